#define _GNU_SOURCE
#include "auth.h"

#include <crypt.h>
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool hash_password(const char *password, const char *hash, struct crypt_data *scratch, char *out, size_t size)
{
    const char *made = crypt_r(password, hash, scratch);
    bool good = made && made[0] != '*' && strlen(made) < size;
    if (good)
        memcpy(out, made, strlen(made) + 1);
    explicit_bzero(scratch, sizeof *scratch);
    return good;
}

bool auth_check_hash(const char *hash)
{
    static const char *const methods[] = {"$y$", "$7$", "$2b$", "$2y$", "$6$", "$5$"};
    char made[sizeof((struct auth *)NULL)->hash];
    bool known = false;
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        known |= !strncmp(hash, methods[i], strlen(methods[i]));
    struct crypt_data *scratch = known && strlen(hash) < sizeof made ? calloc(1, sizeof *scratch) : NULL;
    /* A hash is as long as any other of its setting, and begins with that. */
    bool good = scratch && hash_password("", hash, scratch, made, sizeof made) && strlen(made) == strlen(hash) &&
                strrchr(made, '$') - made == strrchr(hash, '$') - hash;
    free(scratch);
    return good;
}

bool auth_init(struct auth *auth, const char *user, const char *hash, unsigned each_second)
{
    *auth = (struct auth){.each_second = each_second};
    if (!user)
        return true;
    snprintf(auth->user, sizeof auth->user, "%s", user);
    snprintf(auth->hash, sizeof auth->hash, "%s", hash);
    auth->scratch = calloc(1, sizeof *auth->scratch);
    return auth->scratch && gnutls_rnd(GNUTLS_RND_KEY, auth->key, sizeof auth->key) == 0;
}

void auth_free(struct auth *auth)
{
    free(auth->scratch);
    explicit_bzero(auth, sizeof *auth);
}

static bool same(const void *one, const void *other, size_t bytes)
{
    return gnutls_memcmp(one, other, bytes) == 0; /* in constant time */
}

/* The lengths stand before the texts, so that no two pairs are written alike. */
static bool digest(const struct auth *auth, const char *user, const char *password, unsigned char *out)
{
    char text[AUTH_TEXT_BYTES];
    int count = snprintf(text, sizeof text, "%zu:%s:%s", strlen(user), user, password);
    bool good = count > 0 && (size_t)count < sizeof text &&
                gnutls_hmac_fast(GNUTLS_MAC_SHA256, auth->key, sizeof auth->key, text, (size_t)count, out) == 0;
    explicit_bzero(text, sizeof text);
    return good;
}

static bool may_hash(struct auth *auth, uint64_t now_ns)
{
    if (now_ns / 1000000000 != auth->second) {
        auth->second = now_ns / 1000000000;
        auth->left = auth->each_second;
    }
    return auth->left && auth->left--;
}

static bool matches(struct auth *auth, const char *user, const char *password)
{
    char made[sizeof auth->hash] = "";
    bool hashed = hash_password(password, auth->hash, auth->scratch, made, sizeof made);
    bool password_good = hashed && same(made, auth->hash, sizeof made);
    bool user_good = strlen(user) == strlen(auth->user) && same(user, auth->user, strlen(user));
    return password_good & user_good;
}

enum auth_answer auth_check(struct auth *auth, const char *user, const char *password, uint64_t now_ns)
{
    unsigned char given[AUTH_DIGEST_BYTES];
    if (!auth->user[0])
        return AUTH_PASSED;
    if (!user || !password || !digest(auth, user, password, given))
        return AUTH_REFUSED;
    if (auth->knows && same(given, auth->known, sizeof given))
        return AUTH_PASSED;
    if (!may_hash(auth, now_ns))
        return AUTH_TOO_OFTEN;
    if (!matches(auth, user, password))
        return AUTH_REFUSED;
    memcpy(auth->known, given, sizeof given);
    auth->knows = true;
    return AUTH_PASSED;
}
