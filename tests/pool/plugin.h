/*
 * plugin.h - a shared library made of libvpmm.a and libvpmm_sim.a, for a program that loads it while it runs.
 *
 * It has one pool, with front caches, on a simulated GPU. Its one symbol is `plugin`.
 */
#ifndef VPMM_TESTS_PLUGIN_H
#define VPMM_TESTS_PLUGIN_H

#include <stdbool.h>
#include <stdint.h>

/* A bool is false where anything failed. */
struct plugin {
    bool (*open)(void);
    /* By any thread, several at once: pages and pieces, on one of the plugin's streams and on the thread's own. */
    bool (*work)(unsigned number);
    bool (*refuse)(uint64_t address); /* frees what is nobody's, which must fail */
    const char *(*words)(void);       /* of the calling thread's last failure */
    bool (*front_caches_were_used)(void);
    void *(*pool)(void); /* a vpmm_pool: of its own copy of the library */
    bool (*close)(void); /* also if anything raced, was misused or leaks */
};

extern const struct plugin plugin;

#endif
