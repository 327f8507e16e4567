/*
 * switch.h - the preload's own variables, which take what vpmm's take that are on or off. Another text is off: there is
 * nobody to be told, in a program that does not know of vpmm.
 */
#ifndef VPMM_PRELOAD_SWITCH_H
#define VPMM_PRELOAD_SWITCH_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static inline bool switch_is_on(const char *variable)
{
    static const char *const words[] = {"1", "on", "true", "yes"};
    const char *text = getenv(variable);
    for (size_t i = 0; text && i < sizeof words / sizeof *words; i++)
        if (strcmp(text, words[i]) == 0)
            return true;
    return false;
}

#endif
