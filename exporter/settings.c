#define _GNU_SOURCE
#include "settings.h"

#include "auth.h"

#include <arpa/inet.h>
#include <errno.h>
#include <gnutls/gnutls.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vpmm/observe.h>

vpmm_exporter_config vpmm_exporter_config_default(void)
{
    return (vpmm_exporter_config){.address = "127.0.0.1",
                                  .port = 9435,
                                  .limits = {.connections = 64,
                                             .connections_per_address = 32,
                                             .deadline_ms = 10000,
                                             .header_bytes = 16384,
                                             .requests_per_second = 50,
                                             .passwords_per_second = 4,
                                             .reaper_stall_ms = 10000}};
}

static vpmm_status no_memory(const char *field)
{
    return vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "no host memory or no descriptor to read vpmm_exporter_config.%s",
                          field);
}

/* ---- limits ---- */

/* `note`: what the most is, in brackets. */
static vpmm_status check_limit(const char *field, unsigned value, unsigned least, unsigned most, const char *note)
{
    if (value >= least && value <= most)
        return VPMM_SUCCESS;
    return vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_exporter_config.limits.%s is %u: %u to %u%s is allowed",
                          field, value, least, most, note);
}

static vpmm_status check_limits(const vpmm_exporter_limits *limits)
{
    const struct {
        const char *field;
        unsigned value, least, most;
        const char *note;
    } checks[] = {
        {"connections", limits->connections, 4, 4096, ""},
        {"connections_per_address", limits->connections_per_address, 1, limits->connections, " (connections)"},
        {"deadline_ms", limits->deadline_ms, 100, 600000, ""},
        {"header_bytes", limits->header_bytes, 4096, 1 << 20, ""},
        {"requests_per_second", limits->requests_per_second, 1, 100000, ""},
        {"passwords_per_second", limits->passwords_per_second, 1, 1000, ""},
        {"reaper_stall_ms", limits->reaper_stall_ms, 1000, 3600000, ""},
    };
    vpmm_status status = VPMM_SUCCESS;
    for (size_t i = 0; i < sizeof checks / sizeof *checks && status == VPMM_SUCCESS; i++)
        status = check_limit(checks[i].field, checks[i].value, checks[i].least, checks[i].most, checks[i].note);
    return status;
}

/* ---- address ---- */

/* Linux binds a listener to such an address, which nobody can connect to. */
static bool is_of_many(const struct settings *settings)
{
    struct in_addr v4 = ((const struct sockaddr_in *)&settings->socket_address)->sin_addr;
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)&settings->socket_address)->sin6_addr;
    bool is_v6 = settings->socket_address.ss_family == AF_INET6;
    if (is_v6 && !IN6_IS_ADDR_V4MAPPED(v6))
        return IN6_IS_ADDR_MULTICAST(v6);
    if (is_v6)
        memcpy(&v4, &v6->s6_addr[12], sizeof v4);
    return IN_MULTICAST(ntohl(v4.s_addr)) || ntohl(v4.s_addr) == INADDR_BROADCAST;
}

/* Of IPv4 all four numbers, which getaddrinfo does not ask for; of IPv6 with the interface of a link-local address. */
static vpmm_status resolve(struct settings *settings, const char *address, uint16_t port)
{
    const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found;
    struct in_addr v4;
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    if (!address || strlen(address) >= sizeof settings->address ||
        (!strchr(address, ':') && inet_pton(AF_INET, address, &v4) != 1))
        return VPMM_ERROR_INVALID_VALUE;
    int error = getaddrinfo(address, service, &hints, &found);
    if (error)
        return error == EAI_MEMORY || error == EAI_SYSTEM ? VPMM_ERROR_HOST_MEMORY : VPMM_ERROR_INVALID_VALUE;
    memcpy(&settings->socket_address, found->ai_addr, found->ai_addrlen);
    settings->socket_address_bytes = found->ai_addrlen;
    freeaddrinfo(found);
    return is_of_many(settings) ? VPMM_ERROR_INVALID_VALUE : VPMM_SUCCESS;
}

static vpmm_status read_address(struct settings *settings, const vpmm_exporter_config *config)
{
    vpmm_status status = resolve(settings, config->address, config->port);
    if (status == VPMM_ERROR_HOST_MEMORY)
        return no_memory("address");
    if (status != VPMM_SUCCESS)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                              "vpmm_exporter_config.address is '%.80s': the numeric IPv4 or IPv6 address of one "
                              "interface is allowed, such as 127.0.0.1 or ::1, or of all, 0.0.0.0 or ::",
                              config->address ? config->address : "(NULL)");
    snprintf(settings->address, sizeof settings->address, "%s", config->address);
    settings->port = config->port;
    return VPMM_SUCCESS;
}

static bool is_loopback(const struct settings *settings)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&settings->socket_address;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&settings->socket_address;
    if (settings->socket_address.ss_family == AF_INET)
        return ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ||
           (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr) && v6->sin6_addr.s6_addr[12] == IN_LOOPBACKNET);
}

/* ---- TLS ---- */

enum { PEM_BYTES = 1 << 20 };

/* What the file holds, at most a byte too much. NULL: *words says why, or is NULL for want of memory or descriptors. */
static char *read_file(const char *path, const char **words)
{
    FILE *file = fopen(path, "re");
    bool had_room = file || (errno != ENOMEM && errno != EMFILE && errno != ENFILE);
    char *text = file ? calloc(1, PEM_BYTES + 2) : NULL;
    size_t count = text ? fread(text, 1, PEM_BYTES + 1, file) : 0;
    *words = !had_room           ? NULL
             : !file             ? strerror(errno)
             : !text             ? NULL
             : ferror(file)      ? "it cannot be read"
             : count > PEM_BYTES ? "it is too long"
                                 : "it is empty";
    if (file)
        fclose(file);
    if (count && count <= PEM_BYTES)
        return text;
    free(text);
    return NULL;
}

/* The text of a file, or a copy of the text that was given, which may be a key: it is not shown. */
static vpmm_status read_pem(const char *field, const char *given, char **text)
{
    const char *words = NULL;
    bool is_path = !strstr(given, "-----BEGIN");
    *text = is_path ? read_file(given, &words) : strdup(given);
    if (*text)
        return VPMM_SUCCESS;
    if (!words)
        return no_memory(field);
    return vpmm_error_set(
        VPMM_ERROR_INVALID_VALUE,
        "vpmm_exporter_config.%s is '%.200s': %s; a file in PEM of at most 1 MiB is allowed, or its text", field,
        strchr(given, '\n') ? "(lines, not shown)" : given, words);
}

static vpmm_status check_pair(const struct settings *settings)
{
    gnutls_certificate_credentials_t credentials;
    const gnutls_datum_t cert = {(unsigned char *)settings->cert, (unsigned)strlen(settings->cert)};
    const gnutls_datum_t key = {(unsigned char *)settings->key, (unsigned)strlen(settings->key)};
    if (gnutls_certificate_allocate_credentials(&credentials) != 0)
        return vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "no host memory for the exporter's TLS");
    int error = gnutls_certificate_set_x509_key_mem(credentials, &cert, &key, GNUTLS_X509_FMT_PEM);
    gnutls_certificate_free_credentials(credentials);
    if (error >= 0)
        return VPMM_SUCCESS;
    if (error == GNUTLS_E_MEMORY_ERROR)
        return no_memory("tls_cert and tls_key");
    return vpmm_error_set(
        VPMM_ERROR_INVALID_VALUE,
        "vpmm_exporter_config.tls_cert and tls_key: %s; a certificate and its own key, both in PEM, are "
        "allowed",
        gnutls_strerror(error));
}

static vpmm_status read_tls(struct settings *settings, const vpmm_exporter_config *config)
{
    if (!config->tls_cert && !config->tls_key)
        return VPMM_SUCCESS;
    if (!config->tls_cert || !config->tls_key)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                              "vpmm_exporter_config.%s is NULL and %s is not: both or neither are allowed",
                              config->tls_cert ? "tls_key" : "tls_cert", config->tls_cert ? "tls_cert" : "tls_key");
    vpmm_status status = read_pem("tls_cert", config->tls_cert, &settings->cert);
    if (status == VPMM_SUCCESS)
        status = read_pem("tls_key", config->tls_key, &settings->key);
    return status == VPMM_SUCCESS ? check_pair(settings) : status;
}

/* ---- authentication ---- */

static vpmm_status check_auth(struct settings *settings, const vpmm_exporter_config *config)
{
    const char *user = config->auth_user, *hash = config->auth_hash;
    if (!user && !hash)
        return VPMM_SUCCESS;
    if (!user || !hash)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                              "vpmm_exporter_config.%s is NULL and %s is not: both or neither are allowed",
                              user ? "auth_hash" : "auth_user", user ? "auth_user" : "auth_hash");
    if (!user[0] || strchr(user, ':') || strlen(user) >= sizeof((struct auth *)NULL)->user)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                              "vpmm_exporter_config.auth_user is '%.130s': 1 to %zu bytes without a colon are allowed",
                              user, sizeof((struct auth *)NULL)->user - 1);
    vpmm_status status = auth_check_hash(hash);
    if (status == VPMM_ERROR_HOST_MEMORY)
        return no_memory("auth_hash");
    if (status != VPMM_SUCCESS) /* it may be a password by mistake: its value is not shown */
        return vpmm_error_set(
            VPMM_ERROR_INVALID_VALUE,
            "vpmm_exporter_config.auth_hash is no hash of a password (%zu bytes, not shown): a whole hash "
            "of crypt(5) is allowed, by " AUTH_METHODS ", as mkpasswd makes them",
            strlen(hash));
    if (!settings->cert && !is_loopback(settings))
        return vpmm_error_set(
            VPMM_ERROR_INVALID_VALUE,
            "vpmm_exporter_config.auth_user is '%s' without tls_cert on address '%s': passwords in plain "
            "text are allowed on loopback alone (127.0.0.0/8, ::1)",
            user, settings->address);
    settings->auth_user = user;
    settings->auth_hash = hash;
    return VPMM_SUCCESS;
}

vpmm_status settings_read(struct settings *settings, const vpmm_exporter_config *config)
{
    *settings = (struct settings){.limits = config->limits};
    vpmm_status status = check_limits(&config->limits);
    if (status == VPMM_SUCCESS)
        status = read_address(settings, config);
    if (status == VPMM_SUCCESS)
        status = read_tls(settings, config);
    if (status == VPMM_SUCCESS)
        status = check_auth(settings, config);
    if (status != VPMM_SUCCESS)
        settings_free(settings);
    return status;
}

void settings_free(struct settings *settings)
{
    free(settings->cert);
    if (settings->key)
        explicit_bzero(settings->key, strlen(settings->key));
    free(settings->key);
    settings->cert = settings->key = NULL;
}
