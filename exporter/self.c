#define _GNU_SOURCE
#include "self.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Field 22 of /proc/self/stat, in clock ticks since boot; fields are counted after the name, which may hold anything.
 */
static uint64_t ticks_at_start(void)
{
    char line[1024], *at;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file)
        return 0;
    size_t count = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[count] = '\0';
    at = strrchr(line, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void self_open(struct self *self)
{
    uint64_t boot_ns = clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_BOOTTIME);
    self->start_ns = boot_ns + ticks_at_start() * (1000000000 / (uint64_t)sysconf(_SC_CLK_TCK));
    self->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    self->fds = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

void self_close(struct self *self)
{
    if (self->statm >= 0)
        close(self->statm);
    if (self->fds >= 0)
        close(self->fds);
}

/* By the kernel's linux_dirent64: names of digits alone, "." and ".." are not counted. */
static uint64_t count_entries(int directory)
{
    _Alignas(struct dirent64) char buffer[8192];
    uint64_t entries = 0;
    long bytes;
    lseek(directory, 0, SEEK_SET);
    while ((bytes = syscall(SYS_getdents64, directory, buffer, sizeof buffer)) > 0)
        for (long at = 0; at < bytes; at += ((struct dirent64 *)(buffer + at))->d_reclen)
            entries += ((struct dirent64 *)(buffer + at))->d_name[0] != '.';
    return entries;
}

/* Linux 6.2 and later say the number as the directory's size. */
static uint64_t open_fds(int directory)
{
    struct stat stat;
    if (directory < 0)
        return 0;
    return fstat(directory, &stat) == 0 && stat.st_size > 0 ? (uint64_t)stat.st_size : count_entries(directory);
}

static void read_memory(int statm, struct self_usage *out)
{
    char line[128];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    ssize_t count = statm < 0 ? -1 : pread(statm, line, sizeof line - 1, 0);
    if (count <= 0)
        return;
    line[count] = '\0';
    char *at = line;
    out->virtual_bytes = strtoull(at, &at, 10) * page;
    out->resident_bytes = strtoull(at, &at, 10) * page;
}

struct self_usage self_read(const struct self *self)
{
    struct self_usage usage = {.start_ns = self->start_ns, .cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID)};
    struct rlimit limit;
    read_memory(self->statm, &usage);
    usage.open_fds = open_fds(self->fds);
    usage.max_fds = getrlimit(RLIMIT_NOFILE, &limit) == 0 ? (uint64_t)limit.rlim_cur : 0;
    return usage;
}
