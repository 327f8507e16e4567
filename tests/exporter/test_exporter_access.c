/*
 * Who may ask the exporter, and how: wrong settings are refused in words, passwords are checked against their hash
 * alone, TLS is spoken in its two latest versions, and what is served follows the Accept headers.
 */
#define _GNU_SOURCE
#include "client.h"
#include "support.h"

#include <crypt.h>
#include <dlfcn.h>
#include <errno.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <sys/resource.h>

#include <vpmm/exporter.h>

#include "auth.h"
#include "negotiate.h"

static vpmm_exporter_config quiet_config(void)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    config.port = 0;
    config.limits.deadline_ms = 600000; /* a request may take long on a busy machine */
    return config;
}

/* ---- settings ---- */

/* The configuration is refused, in words that have the field, its value and what is allowed. */
#define refused(config, ...) refused_at((config), (const char *const[]){__VA_ARGS__, "allowed", NULL}, __LINE__)

static void refused_at(const vpmm_exporter_config *config, const char *const *words, int line)
{
    vpmm_exporter *exporter = NULL;
    vpmm_status status = vpmm_exporter_start(config, &exporter);
    require(status == VPMM_ERROR_INVALID_VALUE && !exporter, "line %d: %s", line, vpmm_status_name(status));
    for (; *words; words++)
        require(strstr(vpmm_last_error(), *words), "line %d: '%s' does not say '%s'", line, vpmm_last_error(), *words);
}

static char hash[CRYPT_OUTPUT_SIZE];

static const char *hash_of(const char *password)
{
    struct crypt_data *scratch = calloc(1, sizeof *scratch);
    strcpy(hash, crypt_r(password, "$6$rounds=1000$salt$", scratch));
    free(scratch);
    return hash;
}

Test(exporter_access, wrong_settings_are_named)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    cr_assert_str_eq(config.address, "127.0.0.1");
    cr_assert_eq(config.port, 9435);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_start(&config, NULL));
    for (const char *const *address = (const char *const[]){"localhost", "", "1.2.3", "127.0.0.1:80", "::g", NULL};
         *address; address++) {
        config = quiet_config();
        config.address = *address;
        refused(&config, "address", *address);
    }
    config.address = NULL;
    refused(&config, "address", "NULL");

#define LIMIT(field, wrong)                                                                                            \
    config = quiet_config();                                                                                           \
    config.limits.field = (wrong);                                                                                     \
    refused(&config, "limits." #field, " " #wrong ":");
    LIMIT(connections, 3)
    LIMIT(connections, 4097)
    LIMIT(connections_per_address, 0)
    LIMIT(connections_per_address, 65)
    LIMIT(deadline_ms, 99)
    LIMIT(header_bytes, 100)
    LIMIT(requests_per_second, 0)
    LIMIT(passwords_per_second, 0)
    LIMIT(reaper_stall_ms, 999)
    LIMIT(deadline_ms, 600001)
    LIMIT(header_bytes, 4095)
    LIMIT(header_bytes, 1048577)
    LIMIT(requests_per_second, 100001)
    LIMIT(passwords_per_second, 1001)
    LIMIT(reaper_stall_ms, 3600001)
}

Test(exporter_access, wrong_credentials_and_certificates_are_named)
{
    vpmm_exporter_config config = quiet_config();
    config.auth_user = "scraper";
    refused(&config, "auth_hash", "NULL");
    config.auth_hash = "secret";
    refused(&config, "auth_hash", "crypt(5)");
    cr_assert_null(strstr(vpmm_last_error(), "secret"), "what may be a password is shown");
    for (const char *const *bad = (const char *const[]){"$6$salt$short", "$6$salt$", "$1$salt$qJH7.N4xYta3aEG/dfqo/0",
                                                        "abJnggxhB/yWI", "*0", "", "$9$x", NULL};
         *bad; bad++) {
        config.auth_hash = *bad;
        refused(&config, "auth_hash");
    }
    config.auth_hash = hash_of("x");
    config.auth_user = "a:b";
    refused(&config, "auth_user", "a:b");
    config.auth_user = "";
    refused(&config, "auth_user");
    config.auth_user = NULL;
    refused(&config, "auth_user", "NULL");

    config.auth_user = "scraper"; /* in plain text, on a network */
    config.address = "0.0.0.0";
    refused(&config, "auth_user", "scraper", "0.0.0.0", "loopback");
    config.address = "::";
    refused(&config, "auth_user", "loopback");

    config = quiet_config();
    config.tls_cert = "/nowhere.pem";
    refused(&config, "tls_key", "NULL");
    config.tls_key = "/nowhere.key";
    refused(&config, "tls_cert", "/nowhere.pem", "No such file");
    config.tls_cert = config.tls_key = "-----BEGIN NONSENSE-----\n";
    refused(&config, "tls_cert", "PEM");
    config.tls_cert = config.tls_key = "/dev/zero";
    refused(&config, "tls_cert", "/dev/zero");
    config.tls_cert = NULL;
    refused(&config, "tls_cert", "NULL");
}

Test(exporter_access, an_address_that_is_not_ours_is_an_error)
{
    vpmm_exporter *exporter;
    vpmm_exporter_config config = quiet_config();
    config.address = "192.0.2.1"; /* for documentation: nobody's */
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_exporter_start(&config, &exporter));
    cr_assert(strstr(vpmm_last_error(), "192.0.2.1"));
    config.address = "fe80::1"; /* of which interface? */
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_exporter_start(&config, &exporter));
    static const char *const of_many[] = {"224.0.0.1", "255.255.255.255", "ff02::1", "::ffff:224.0.0.1"};
    for (size_t i = 0; i < sizeof of_many / sizeof of_many[0]; i++) {
        config.address = of_many[i];
        refused(&config, "address", of_many[i]);
    }
}

/* ---- passwords ---- */

static int status_with(unsigned host, uint16_t port, const char *credentials)
{
    char header[256];
    snprintf(header, sizeof header, "Authorization: Basic %s\r\n", credentials);
    struct reply reply = client_ask_from(host, port, "GET", "/metrics", header);
    int status = reply.status;
    reply_free(&reply);
    return status;
}

Test(exporter_access, passwords)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    config.auth_user = "scraper";
    config.auth_hash = hash_of("open sesame");
    config.limits.passwords_per_second = 20; /* more than come, and few enough that none is slow */
    must_work(vpmm_exporter_start(&config, &exporter));
    uint16_t port = vpmm_exporter_port(exporter);
    struct reply reply = client_get(port, "/metrics", "");
    cr_assert_eq(reply.status, 401);
    cr_assert(strstr(reply.bytes, "WWW-Authenticate: Basic realm=\"vpmm\""));
    reply_free(&reply);
    cr_assert_eq(status_with(1, port, "c2NyYXBlcjpvcGVuIHNlc2FtZQ=="), 200); /* scraper:open sesame */
    cr_assert_eq(status_with(1, port, "c2NyYXBlcjpvcGVuIHNlc2FtZQ=="), 200); /* known again */
    cr_assert_eq(status_with(1, port, "c2NyYXBlcjpvcGVu"), 401);             /* scraper:open */
    cr_assert_eq(status_with(1, port, "c2NyYXBlcg=="), 401);                 /* no colon */
    cr_assert_eq(status_with(1, port, "c2NyYXBlOnJvcGVuIHNlc2FtZQ=="), 401); /* scrape:ropen sesame */
    cr_assert_eq(status_with(1, port, "Om9wZW4gc2VzYW1l"), 401);             /* :open sesame */
    cr_assert_eq(status_with(1, port, "%%%"), 401);
    cr_assert_eq(status_with(1, port, ""), 401);
    must_work(vpmm_exporter_stop(exporter));
}

static const uint64_t second = 1000000000;

/* Of "u" with the password "p". */
static struct auth open_auth(unsigned each_second)
{
    struct auth auth;
    cr_assert(auth_init(&auth, "u", hash_of("p"), each_second));
    return auth;
}

/* Guessing is slow, and keeps out nobody whose password is known already. */
Test(exporter_access, guesses_are_counted)
{
    struct auth auth = open_auth(2);
    cr_assert_eq(auth_check(&auth, "u", "p", false, second), AUTH_PASSED);
    cr_assert_eq(auth_check(&auth, "u", "q", false, second), AUTH_REFUSED);
    cr_assert_eq(auth_check(&auth, "u", "r", false, second), AUTH_TOO_OFTEN);
    cr_assert_eq(auth_check(&auth, "u", "p", false, second), AUTH_PASSED);
    cr_assert_eq(auth_check(&auth, NULL, NULL, false, second), AUTH_REFUSED);
    cr_assert_eq(auth_check(&auth, "u", "r", false, 2 * second), AUTH_REFUSED);
    cr_assert_eq(auth_check(&auth, "v", "p", false, 2 * second), AUTH_REFUSED);
    cr_assert_eq(auth_check(&auth, "u", "p", false, 2 * second), AUTH_PASSED);
    auth_free(&auth);
}

/* Who guesses leaves the last hash of a second to those who have not. */
Test(exporter_access, guesses_keep_nobody_out)
{
    struct auth auth = open_auth(2);
    cr_assert_eq(auth_check(&auth, "u", "q", true, second), AUTH_REFUSED);
    cr_assert_eq(auth_check(&auth, "u", "r", true, second), AUTH_TOO_OFTEN);
    cr_assert_eq(auth_check(&auth, "u", "p", false, second), AUTH_PASSED);
    auth_free(&auth);
    auth = open_auth(1); /* where there is but one it is everybody's */
    cr_assert_eq(auth_check(&auth, "u", "p", true, second), AUTH_PASSED);
    auth_free(&auth);
}

/* Half of the time at least, and three quarters of it beside guesses. */
Test(exporter_access, slow_hashes_leave_time_for_others)
{
    struct auth auth = open_auth(10000000);
    cr_assert_eq(auth_check(&auth, "u", "q", false, second), AUTH_REFUSED);
    uint64_t end = auth.hashed_ns, took = auth.slow_ns;
    cr_assert_gt(took, 0);
    cr_assert_eq(end, second + took);
    cr_assert_eq(auth_check(&auth, "u", "p", false, end + took - 1), AUTH_TOO_OFTEN);
    cr_assert_eq(auth_check(&auth, "u", "p", true, end + 3 * took - 1), AUTH_TOO_OFTEN);
    cr_assert_eq(auth_check(&auth, "u", "q", false, end + took), AUTH_REFUSED);
    end = auth.hashed_ns, took = auth.slow_ns;
    cr_assert_eq(auth_check(&auth, "u", "p", true, end + 3 * took), AUTH_PASSED);
    auth_free(&auth);
}

static uint64_t thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * second + (uint64_t)now.tv_nsec;
}

static uint64_t hash_ns; /* that each hash takes at least */
static atomic_bool has_no_memory;

/* libcrypt's, for the exporter as well. */
char *crypt_r(const char *phrase, const char *setting, struct crypt_data *data)
{
    char *(*real)(const char *, const char *, struct crypt_data *);
    void *symbol = dlsym(RTLD_NEXT, "crypt_r");
    memcpy(&real, &symbol, sizeof real);
    for (uint64_t end = thread_ns() + hash_ns; thread_ns() < end;)
        ;
    if (!atomic_load(&has_no_memory))
        return real(phrase, setting, data);
    errno = EINVAL; /* as for yescrypt and scrypt */
    return strcpy(data->output, "*0");
}

/* Four of 0.19 s would leave a second less than half of its time. */
Test(exporter_access, hashes_that_take_most_of_a_second_are_slow)
{
    struct auth auth = open_auth(4);
    hash_ns = second * 19 / 100;
    cr_assert_eq(auth_check(&auth, "u", "q", false, second), AUTH_REFUSED);
    cr_assert_geq(auth.slow_ns, hash_ns);
    cr_assert_eq(auth_check(&auth, "u", "p", false, auth.hashed_ns), AUTH_TOO_OFTEN);
    auth_free(&auth);
}

static void begin_a_second(void)
{
    do
        usleep(1000);
    while (client_now_ms() % 1000 > 50);
}

/* From two addresses, in one second: the one that guesses is heard once, and the other one after it. */
Test(exporter_access, a_wrong_password_is_remembered)
{
    enum { TRIES = 50 };
    vpmm_exporter *exporter;
    vpmm_exporter_config config = quiet_config();
    config.auth_user = "scraper";
    config.auth_hash = hash_of("open sesame");
    config.limits.passwords_per_second = 2;
    must_work(vpmm_exporter_start(&config, &exporter));
    uint16_t port = vpmm_exporter_port(exporter);
    bool left_one = false;
    cr_assert_eq(status_with(1, port, "c2NyYXBlcjpvcGVu"), 401); /* scraper:open */
    for (int i = 0; i < TRIES && !left_one; i++) {               /* the second may end meanwhile */
        begin_a_second();
        left_one = status_with(1, port, "c2NyYXBlcjpvcGVu") == 401 && status_with(1, port, "c2NyYXBlcjpvcGVu") == 429;
        cr_assert_eq(status_with(2, port, "c2NyYXBlcjpvcGVuIHNlc2FtZQ=="), 200);
    }
    cr_assert(left_one, "who guesses takes all");
    must_work(vpmm_exporter_stop(exporter));
}

/* A password that cannot be hashed now is neither right nor wrong, and is not held against its address. */
Test(exporter_access, without_host_memory_a_password_may_come_again)
{
    vpmm_exporter *exporter;
    vpmm_exporter_config config = quiet_config();
    config.auth_user = "scraper";
    config.auth_hash = hash_of("open sesame");
    config.limits.passwords_per_second = 2; /* of which who has failed is given one */
    must_work(vpmm_exporter_start(&config, &exporter));
    uint16_t port = vpmm_exporter_port(exporter);
    static const char good[] = "Authorization: Basic c2NyYXBlcjpvcGVuIHNlc2FtZQ==\r\n";
    begin_a_second();
    atomic_store(&has_no_memory, true);
    struct reply reply = client_get(port, "/metrics", good);
    cr_assert_eq(reply.status, 429);
    cr_assert(strstr(reply.bytes, "Retry-After: 1\r\n"));
    reply_free(&reply);
    atomic_store(&has_no_memory, false);
    reply = client_get(port, "/metrics", good);
    cr_assert_eq(reply.status, 200, "%d", reply.status);
    cr_assert_eq(sample(reply.body, "vpmm_exporter_refusals_total{reason=\"passwords\"}"), 1);
    cr_assert_eq(sample(reply.body, "vpmm_exporter_refusals_total{reason=\"auth\"}"), 0);
    reply_free(&reply);
    must_work(vpmm_exporter_stop(exporter));
}

Test(exporter_access, methods_of_hashes)
{
    struct crypt_data *scratch = calloc(1, sizeof *scratch);
    char salt[CRYPT_GENSALT_OUTPUT_SIZE];
    for (const char *const *prefix = (const char *const[]){"$y$", "$2b$", "$5$", NULL}; *prefix; prefix++) {
        cr_assert(
            crypt_gensalt_rn(*prefix, **prefix == '$' && (*prefix)[1] == 'y' ? 1 : 0, NULL, 0, salt, sizeof salt));
        const char *made = crypt_r("password", salt, scratch);
        require(made && auth_check_hash(made) == VPMM_SUCCESS, "%s is not taken", made);
        char cut[CRYPT_OUTPUT_SIZE];
        strcpy(cut, made);
        cut[strlen(cut) - 1] = '\0';
        require(auth_check_hash(cut) == VPMM_ERROR_INVALID_VALUE, "%s is taken", cut);
    }
    free(scratch);
}

/* ---- TLS ---- */

static char *pem_of_certificate, *pem_of_key;

static void make_certificate(void)
{
    gnutls_x509_privkey_t key;
    gnutls_x509_crt_t crt;
    gnutls_datum_t text;
    gnutls_x509_privkey_init(&key);
    gnutls_x509_crt_init(&crt);
    require(gnutls_x509_privkey_generate(key, GNUTLS_PK_ECDSA, GNUTLS_CURVE_TO_BITS(GNUTLS_ECC_CURVE_SECP256R1), 0) ==
                0,
            "a key");
    gnutls_x509_crt_set_version(crt, 3);
    gnutls_x509_crt_set_serial(crt, "\1", 1);
    gnutls_x509_crt_set_activation_time(crt, time(NULL) - 60);
    gnutls_x509_crt_set_expiration_time(crt, time(NULL) + 3600);
    gnutls_x509_crt_set_dn(crt, "CN=test", NULL);
    gnutls_x509_crt_set_key(crt, key);
    require(gnutls_x509_crt_sign2(crt, crt, key, GNUTLS_DIG_SHA256, 0) == 0, "a certificate");
    gnutls_x509_crt_export2(crt, GNUTLS_X509_FMT_PEM, &text);
    pem_of_certificate = strdup((char *)text.data);
    gnutls_free(text.data);
    gnutls_x509_privkey_export2(key, GNUTLS_X509_FMT_PEM, &text);
    pem_of_key = strdup((char *)text.data);
    gnutls_free(text.data);
    gnutls_x509_crt_deinit(crt);
    gnutls_x509_privkey_deinit(key);
}

/* The status of a GET over TLS by these versions; 0: no handshake. */
static int tls_status_of(uint16_t port, const char *versions, const char *target, const char *headers)
{
    gnutls_session_t session;
    gnutls_certificate_credentials_t credentials;
    char bytes[512] = "";
    int status = 0, fd = client_connect(port);
    gnutls_certificate_allocate_credentials(&credentials);
    gnutls_init(&session, GNUTLS_CLIENT);
    gnutls_priority_set_direct(session, versions, NULL);
    gnutls_credentials_set(session, GNUTLS_CRD_CERTIFICATE, credentials);
    gnutls_transport_set_int(session, fd);
    gnutls_handshake_set_timeout(session, CLIENT_PATIENCE_MS);
    if (gnutls_handshake(session) == 0) {
        int count =
            snprintf(bytes, sizeof bytes, "GET %s HTTP/1.1\r\nHost: t\r\nConnection: close\r\n%s\r\n", target, headers);
        gnutls_record_send(session, bytes, (size_t)count);
        ssize_t got = gnutls_record_recv(session, bytes, sizeof bytes - 1);
        bytes[got > 0 ? got : 0] = '\0';
        sscanf(bytes, "HTTP/1.1 %d", &status);
    }
    gnutls_deinit(session);
    gnutls_certificate_free_credentials(credentials);
    close(fd);
    return status;
}

static int tls_status(uint16_t port, const char *versions, const char *headers)
{
    return tls_status_of(port, versions, "/metrics", headers);
}

Test(exporter_access, tls)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    make_certificate();
    config.tls_cert = pem_of_certificate;
    config.tls_key = pem_of_key;
    must_work(vpmm_exporter_start(&config, &exporter));
    uint16_t port = vpmm_exporter_port(exporter);
    cr_assert_eq(tls_status(port, "NORMAL", ""), 200);
    cr_assert_eq(tls_status(port, "NORMAL:-VERS-ALL:+VERS-TLS1.3", ""), 200);
    cr_assert_eq(tls_status(port, "NORMAL:-VERS-ALL:+VERS-TLS1.2", ""), 200);
    cr_assert_eq(tls_status(port, "NORMAL:-VERS-ALL:+VERS-TLS1.1:+VERS-TLS1.0", ""), 0);
    cr_assert_eq(tls_status_of(port, "NORMAL", "https://t/metrics", ""), 200);
    cr_assert_eq(tls_status_of(port, "NORMAL", "http://t/metrics", ""), 404, "the scheme is not the connection's");
    struct reply reply = client_get(port, "/metrics", "");
    cr_assert_eq(reply.status, 0, "plain HTTP is answered");
    reply_free(&reply);
    int fd = client_connect(port); /* garbage, and a hello that never ends */
    client_send(fd, "\x16\x03\x01\xff\xff garbage", 14);
    int half = client_connect(port);
    client_send(half, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
    cr_assert_eq(tls_status(port, "NORMAL", ""), 200);
    uint64_t before = client_now_ms();
    must_work(vpmm_exporter_stop(exporter));
    cr_assert_lt(client_now_ms() - before, 60000, "it waits for clients");
    close(fd), close(half);
    free(pem_of_certificate), free(pem_of_key);
}

/* The C library's close, and what was to be closed that was not open. */
int __real_close(int fd);
int __wrap_close(int fd);
static int closed_in_vain;

int __wrap_close(int fd)
{
    int result = __real_close(fd);
    closed_in_vain += result != 0 && errno == EBADF;
    return result;
}

/* GnuTLS's, for libmicrohttpd as well, which has no memory in the call that is the next but so many. 0: in none. */
static unsigned credentials_to_fail;

int gnutls_certificate_allocate_credentials(gnutls_certificate_credentials_t *credentials)
{
    int (*real)(gnutls_certificate_credentials_t *);
    void *symbol = dlsym(RTLD_NEXT, "gnutls_certificate_allocate_credentials");
    memcpy(&real, &symbol, sizeof real);
    return credentials_to_fail && --credentials_to_fail == 0 ? GNUTLS_E_MEMORY_ERROR : real(credentials);
}

/* In some of its failures libmicrohttpd has closed the listener: its number may be another thread's by then. */
Test(exporter_access, tls_that_cannot_start_closes_nothing_of_others)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    make_certificate();
    config.tls_cert = pem_of_certificate;
    config.tls_key = pem_of_key;
    unsigned failed = 0;
    for (unsigned nth = 1; nth <= 4; nth++) {
        credentials_to_fail = nth;
        vpmm_status status = vpmm_exporter_start(&config, &exporter);
        if (status == VPMM_SUCCESS)
            must_work(vpmm_exporter_stop(exporter));
        failed += status != VPMM_SUCCESS;
    }
    cr_expect_geq(failed, 1);
    cr_expect_eq(closed_in_vain, 0);
    free(pem_of_certificate), free(pem_of_key);
}

/* With TLS a password may be asked for on any address; and certificates are read from files too. */
Test(exporter_access, tls_with_a_password_on_every_interface)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    char cert[] = "/tmp/vpmm-cert-XXXXXX", key[] = "/tmp/vpmm-key-XXXXXX";
    make_certificate();
    int files[] = {mkstemp(cert), mkstemp(key)};
    require(dprintf(files[0], "%s", pem_of_certificate) > 0 && dprintf(files[1], "%s", pem_of_key) > 0, "files");
    close(files[0]), close(files[1]);
    config.address = "0.0.0.0";
    config.tls_cert = cert;
    config.tls_key = key;
    config.auth_user = "scraper";
    config.auth_hash = hash_of("open sesame");
    must_work(vpmm_exporter_start(&config, &exporter));
    uint16_t port = vpmm_exporter_port(exporter);
    cr_assert_eq(tls_status(port, "NORMAL", ""), 401);
    cr_assert_eq(tls_status(port, "NORMAL", "Authorization: Basic c2NyYXBlcjpvcGVuIHNlc2FtZQ==\r\n"), 200);
    must_work(vpmm_exporter_stop(exporter));
    unlink(cert), unlink(key);
    free(pem_of_certificate), free(pem_of_key);
}

/* While it waits for the client libmicrohttpd wants to be called again at once. */
Test(exporter_access, an_unfinished_handshake_costs_no_time)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    make_certificate();
    config.tls_cert = pem_of_certificate;
    config.tls_key = pem_of_key;
    must_work(vpmm_exporter_start(&config, &exporter));
    int half = client_connect(vpmm_exporter_port(exporter));
    client_send(half, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
    usleep(100000);
    double before = client_process_s();
    uint64_t begin = client_now_ms();
    usleep(500000);
    double used = client_process_s() - before, slept = (double)(client_now_ms() - begin) / 1000;
    cr_assert_lt(used, slept / 5, "%g s of %g s were burnt", used, slept);
    cr_assert_eq(tls_status(vpmm_exporter_port(exporter), "NORMAL", ""), 200);
    must_work(vpmm_exporter_stop(exporter));
    close(half);
    free(pem_of_certificate), free(pem_of_key);
}

static char *behind(const char *lines, const char *pem)
{
    char *text = malloc(strlen(lines) + strlen(pem) + 1);
    return strcat(strcpy(text, lines), pem);
}

/* As openssl writes them; and what is no PEM, but may be a key all the same, is not shown. */
Test(exporter_access, texts_with_lines_before_them)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    make_certificate();
    char *cert = behind("\n", pem_of_certificate), *key = behind("Bag Attributes\n    x: 1\n", pem_of_key);
    config.tls_cert = cert;
    config.tls_key = key;
    must_work(vpmm_exporter_start(&config, &exporter));
    cr_assert_eq(tls_status(vpmm_exporter_port(exporter), "NORMAL", ""), 200);
    must_work(vpmm_exporter_stop(exporter));
    config.tls_key = "MHcCAQEEIsecret\nMHcCAQEEIsecret\n";
    refused(&config, "tls_key", "not shown");
    cr_assert_null(strstr(vpmm_last_error(), "secret"));
    free(cert), free(key), free(pem_of_certificate), free(pem_of_key);
}

Test(exporter_access, no_descriptor_for_a_certificate)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    struct rlimit limit = {32, 32};
    config.tls_cert = config.tls_key = "/etc/passwd";
    require(setrlimit(RLIMIT_NOFILE, &limit) == 0, "32 descriptors are allowed");
    while (dup(0) >= 0)
        ;
    must_fail(VPMM_ERROR_HOST_MEMORY, vpmm_exporter_start(&config, &exporter));
    cr_assert(strstr(vpmm_last_error(), "tls_cert"));
}

Test(exporter_access, a_key_of_another_certificate)
{
    vpmm_exporter_config config = quiet_config();
    make_certificate();
    char *cert = pem_of_certificate, *key = pem_of_key;
    make_certificate();
    config.tls_cert = cert;
    config.tls_key = pem_of_key;
    refused(&config, "tls_cert", "tls_key");
    free(cert), free(key), free(pem_of_certificate), free(pem_of_key);
}

/* ---- preferences ---- */

static bool prefers_openmetrics(const char *header)
{
    struct accept accept = accept_nothing();
    accept_read(&accept, header);
    return accept_prefers_openmetrics(&accept);
}

static bool allows_gzip(const char *header)
{
    struct accept_coding coding = accept_coding_nothing();
    accept_coding_read(&coding, header);
    return accept_coding_allows_gzip(&coding);
}

Test(exporter_access, accept_headers)
{
    static const char *const openmetrics[] = {
        "application/openmetrics-text",
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        /* Prometheus 2.42 */
        ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
         "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"),
        "text/plain;q=0.5, APPLICATION/OpenMetrics-Text ; Version=\"1.0.0\" ; Q=0.501",
        "application/*",
        "text/*;q=0.1, */*",
        "text/plain;q=0, */*;q=0.001",
        "text/html, application/openmetrics-text;q=0.2",
        ",,application/openmetrics-text,,",
        "a/b;x=\"c, text/plain, d\",application/openmetrics-text;q=0.9",
        "a/b;x=\"c\\\", text/plain, d\",application/openmetrics-text;q=0.9",
    };
    static const char *const text[] = {
        "",
        "*/*",
        "text/plain",
        "text/html",
        "text/plain;version=0.0.4, application/openmetrics-text;q=0.9",
        "text/plain, application/openmetrics-text",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text;q=0.000",
        "application/openmetrics-text;version=0.0.1",
        "application/openmetrics-text;version=2.0.0",
        "application/openmetrics-text;q=1.5",
        "application/openmetrics-text;q=0.0001",
        "application/openmetrics-text;q=-1",
        "application/openmetrics-text;q=",
        "application/openmetrics-text;q=1.001",
        "application/openmetrics-textual",
        "\"application/openmetrics-text",
        "application/openmetrics-text;q=0.4, text/*;q=0.5",
        "*/*;q=0.9, application/openmetrics-text;q=0.1",
        ";;;",
        "\\",
        "\"\\",
    };
    for (size_t i = 0; i < sizeof openmetrics / sizeof *openmetrics; i++)
        cr_expect(prefers_openmetrics(openmetrics[i]), "%s", openmetrics[i]);
    for (size_t i = 0; i < sizeof text / sizeof *text; i++)
        cr_expect(!prefers_openmetrics(text[i]), "%s", text[i]);
}

Test(exporter_access, accept_encoding_headers)
{
    static const char *const yes[] = {"gzip", "GZIP;q=0.001", "deflate, gzip;q=1.0, *;q=0.5", "x-gzip", "*", "br,gzip"};
    static const char *const no[] = {
        "", "identity", "gzip;q=0", "gzip;q=0.000, *;q=1", "*;q=0", "gzip;q=no", "br;q=1, gzips", "gzi p", "deflate"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        cr_expect(allows_gzip(yes[i]), "%s", yes[i]);
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        cr_expect(!allows_gzip(no[i]), "%s", no[i]);
}

Test(exporter_access, headers_in_several_lines_count_as_one)
{
    vpmm_exporter_config config = quiet_config();
    vpmm_exporter *exporter;
    must_work(vpmm_exporter_start(&config, &exporter));
    struct reply reply = client_get(vpmm_exporter_port(exporter), "/metrics",
                                    "Accept: text/plain;q=0.3\r\nAccept: application/openmetrics-text;q=0.4\r\n");
    cr_assert(strstr(reply.bytes, "application/openmetrics-text"));
    reply_free(&reply);
    must_work(vpmm_exporter_stop(exporter));
}
