/*
 * config.h - the settings of a pool: their defaults, their environment variables, and the check of them as a whole.
 *
 * Texts are checked where they are read (vpmm_config_from_env), values where they are used (config_check), so that a
 * configuration made in a program is held to the same rules as one from the environment.
 */
#ifndef VPMM_LIB_CONFIG_H
#define VPMM_LIB_CONFIG_H

#include <vpmm/vpmm.h>

/* Smaller ones, but for a device whose granularity is, were not tried: 8 TiB of them are too many for a chunk. */
#define CONFIG_LEAST_PAGE ((size_t)256 << 10)

/*
 * Whether a pool can be made of this configuration on a device of this granularity (a power of two). A page_size of 0
 * stands for the granularity. INVALID_VALUE: the message names the field, its variable, its value and what is allowed.
 *   page_size      a power of two, at least CONFIG_LEAST_PAGE or the granularity, if that is less; above the device's
 *                  memory is allowed (the pool then serves every request from the driver's memory pool)
 *   va_size        a multiple of page_size and of the granularity, of 1 to UNITS_A_CHUNK_MAX pages (space/units.h)
 *   initial_pages  fit va_size and max_mapped, in whole granularities
 *   max_mapped     0, or at least a page and the granularity
 *   max_mapped_percent      0 to 100
 *   extent_size    0, or a multiple of page_size and of the granularity
 *   small, reuse, streams   known
 *   decay_ms       at most DECAY_MS_MAX (decay.h), or VPMM_DECAY_NEVER
 *   capture_gate   both functions, or neither
 */
vpmm_status config_check(const vpmm_config *config, size_t granularity);

/* max_mapped becomes the lower of the two caps: what is left to do, and to check, knows bytes alone. */
void config_cap_by_share(vpmm_config *, size_t device_bytes);

/* What the driver maps at least: pages, or the granularity if they are smaller. */
size_t config_mapped_unit(size_t page, size_t granularity);

#endif
