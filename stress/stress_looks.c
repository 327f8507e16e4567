/*
 * stress_looks.c - looks at the pool, beside whatever its lanes do: what it says has to be possible at some instant.
 */
#include "stress.h"

static bool is_seen(run *r, vpmm_status status)
{
    if (status != VPMM_SUCCESS)
        run_end(r, status == VPMM_ERROR_DRIVER ? DEVICE_ERROR : FAILED, "a look at the pool: %s", vpmm_last_error());
    return status == VPMM_SUCCESS;
}

static bool look_at_statistics(run *r)
{
    vpmm_stats stats;
    vpmm_latency latency;
    FILE *nowhere = fopen("/dev/null", "w");
    bool good = nowhere == NULL || is_seen(r, vpmm_dump(r->target.pool, nowhere));
    if (nowhere)
        fclose(nowhere);
    if (!good || !is_seen(r, vpmm_stats_get(r->target.pool, &stats)) ||
        !is_seen(r, vpmm_latency_get(r->target.pool, &latency)))
        return false;
    if ((stats.live_bytes >> 63 | stats.mapped_bytes >> 63 | stats.reusable_bytes >> 63) != 0)
        run_end(r, FAILED, "a statistic is below zero");
    return true;
}

/* Those that others do not change meanwhile are as they were set. The peaks begin anew, and what they were counts. */
static bool look_at_attributes(run *r)
{
    uint64_t value[VPMM_ATTRIBUTE_PEAK_REQUESTED + 1] = {0};
    bool good = true;
    for (int i = 0; good && i <= VPMM_ATTRIBUTE_PEAK_REQUESTED; i++)
        good = is_seen(r, vpmm_pool_get_attribute(r->target.pool, (vpmm_attribute)i, &value[i]));
    run_note_mapped(r, value[VPMM_ATTRIBUTE_PEAK_MAPPED]);
    for (int i = VPMM_ATTRIBUTE_PEAK_MAPPED; good && i <= VPMM_ATTRIBUTE_PEAK_REQUESTED; i++)
        good = is_seen(r, vpmm_pool_set_attribute(r->target.pool, (vpmm_attribute)i, 0));
    if (good && (value[VPMM_ATTRIBUTE_MAX_MAPPED] != r->cap || value[VPMM_ATTRIBUTE_REUSE] != r->config.reuse ||
                 value[VPMM_ATTRIBUTE_DECAY_MS] != r->config.decay_ms))
        run_end(r, FAILED, "an attribute is not as it was set");
    return good;
}

static bool look_at_health(run *r)
{
    vpmm_health health;
    vpmm_device device;
    if (!is_seen(r, vpmm_health_get(r->target.pool, &health)) || !is_seen(r, vpmm_device_get(r->target.pool, &device)))
        return false;
    if (health.reaper != r->config.reaper || device.page_size != r->page_size || device.ordinal != r->ordinal)
        run_end(r, FAILED, "the pool does not say which it is");
    return true;
}

static void visit_range(void *data, const vpmm_range *range)
{
    run *r = data;
    if (range->bytes == 0 || (range->bytes | range->address) % r->page_size != 0 || range->state > VPMM_RANGE_BUSY)
        run_end(r, FAILED, "a range of 0x%llx, %zu bytes, in state %d", (unsigned long long)range->address,
                range->bytes, (int)range->state);
}

/* What its last byte is in, by now: the same, another one that has this byte, or none. */
static void visit_allocation(void *data, const vpmm_allocation *seen)
{
    run *r = data;
    vpmm_allocation now;
    const CUdeviceptr last = seen->address + seen->bytes - 1;
    vpmm_status status = vpmm_allocation_get(r->target.pool, last, &now);
    if (status != VPMM_ERROR_INVALID_POINTER && is_seen(r, status) &&
        (last < now.address || last - now.address >= now.bytes))
        run_end(r, FAILED, "an allocation of 0x%llx, %zu bytes, has 0x%llx in it", (unsigned long long)now.address,
                now.bytes, (unsigned long long)last);
}

static bool look_at(run *r, enum look at)
{
    vpmm_call_counts calls[VPMM_DRIVER_CALLS];
    switch (at) {
    case LOOK_attributes:
        return look_at_attributes(r);
    case LOOK_health:
        return look_at_health(r);
    case LOOK_ranges:
        return is_seen(r, vpmm_ranges_visit(r->target.pool, visit_range, r));
    case LOOK_allocations:
        return is_seen(r, vpmm_allocations_visit(r->target.pool, visit_allocation, r));
    case LOOK_calls:
        return is_seen(r, vpmm_calls_get(r->target.pool, calls));
    default:
        return look_at_statistics(r);
    }
}

bool look_at_pool(run *r, enum look at)
{
    return is_seen(r, vpmm_observe_begin(r->target.pool)) && look_at(r, at) &&
           is_seen(r, vpmm_observe_end(r->target.pool));
}
