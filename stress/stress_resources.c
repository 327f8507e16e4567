/*
 * stress_resources.c - memory, descriptors and threads of the process, by /proc: what a long run must not collect.
 */
#define _GNU_SOURCE 1

#include "stress.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What a run may have more of in its second half. */
#define RESIDENT_SLACK    (UINT64_C(64) << 20)
#define DESCRIPTOR_SLACK  UINT64_C(16)
#define RESIDENT_PER_CENT 25

/* The process's own: what the simulated GPU has of memory is a file's, and comes and goes with what lives there. */
static uint64_t resident_bytes(void)
{
    static const char key[] = "RssAnon:"; /* in KiB */
    char line[128];
    uint64_t kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    if (!status)
        return 0;
    while (fgets(line, sizeof line, status))
        if (strncmp(line, key, sizeof key - 1) == 0)
            kib = strtoull(line + sizeof key - 1, NULL, 10);
    fclose(status);
    return kib << 10;
}

static uint64_t entries_in(const char *path)
{
    uint64_t n = 0;
    DIR *directory = opendir(path);
    if (!directory)
        return 0;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(directory);
    return n;
}

static void raise_to(uint64_t *highest, uint64_t now)
{
    *highest = now > *highest ? now : *highest;
}

void resources_look(resources *used, double part)
{
    double now = now_seconds();
    if (now < used->next_look)
        return;
    used->next_look = now + 1;
    int half = part >= 0.5;
    raise_to(&used->half[half].resident_bytes, resident_bytes());
    raise_to(&used->half[half].descriptors, entries_in("/proc/self/fd"));
    raise_to(&used->half[half].threads, entries_in("/proc/self/task"));
}

void resources_grown(const resources *used, char *words, size_t length)
{
    uint64_t resident = used->half[0].resident_bytes, resident_later = used->half[1].resident_bytes;
    uint64_t open_first = used->half[0].descriptors, open_later = used->half[1].descriptors;
    words[0] = '\0';
#ifdef VPMM_TSAN /* its shadow grows with each address that was ever touched */
    resident_later = 0;
#endif
    if (resident_later > resident / 100 * (100 + RESIDENT_PER_CENT) + RESIDENT_SLACK)
        snprintf(words, length, "resident memory grew from %" PRIu64 " to %" PRIu64 " MiB in the second half",
                 resident >> 20, resident_later >> 20);
    else if (open_later > open_first + DESCRIPTOR_SLACK)
        snprintf(words, length, "open descriptors grew from %" PRIu64 " to %" PRIu64 " in the second half", open_first,
                 open_later);
}
