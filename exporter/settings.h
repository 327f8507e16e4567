/*
 * settings.h - a configuration that has been checked, and what was read and resolved for it.
 *
 * Every rule of vpmm_exporter_config stands in settings.c, so that what the server is started with is known to be good;
 * each violation is told with the field, its value and what is allowed.
 */
#ifndef VPMM_EXPORTER_SETTINGS_H
#define VPMM_EXPORTER_SETTINGS_H

#include <sys/socket.h>

#include <vpmm/exporter.h>

struct settings {
    char address[64]; /* as it was given, for messages */
    uint16_t port;
    struct sockaddr_storage socket_address;
    socklen_t socket_address_bytes;
    char *cert, *key;                  /* PEM; NULL: no TLS */
    const char *auth_user, *auth_hash; /* the caller's; NULL: no authentication. Read by auth_init alone */
    vpmm_exporter_limits limits;
};

/* INVALID_VALUE, HOST_MEMORY; nothing is kept then. */
vpmm_status settings_read(struct settings *, const vpmm_exporter_config *);
void settings_free(struct settings *);

#endif
