/* default_pool.c - a device's default pool: one in the process, made by whoever asks first, and never destroyed. */
#include "base/atomic.h"
#include "base/clock.h"
#include "pool/pool.h"

#include <unistd.h>

enum { DEVICES = 256 };

static _Atomic(void *) pools[DEVICES];
static _Atomic(uint32_t) maker; /* the process whose thread makes one; 0: nobody does */

static vpmm_status make(int device)
{
    vpmm_pool *pool;
    vpmm_config config = vpmm_config_default();
    vpmm_status status = vpmm_config_from_env(&config);
    config.device = device;
    if (status == VPMM_SUCCESS)
        status = vpmm_pool_create(&config, &pool);
    if (status != VPMM_SUCCESS)
        return status;
    pool->is_default = true;
    store_release_ptr(&pools[device], pool); /* pairs with each look */
    return VPMM_SUCCESS;
}

/*
 * No mutex, which the child of a fork would find taken for ever: there the maker is a thread that it has not. Others
 * wait for the maker, who needs as long as a pool's creation, and look again.
 */
static vpmm_status make_or_wait(int device)
{
    uint32_t self = (uint32_t)getpid(), seen = 0;
    if (cas_sc_u32(&maker, &seen, self)) {
        vpmm_status status = load_acquire_ptr(&pools[device]) ? VPMM_SUCCESS : make(device);
        store_sc_u32(&maker, 0);
        return status;
    }
    if (seen != self)
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "vpmm_pool_default: this process was forked while a default pool was made; "
                    "CUDA cannot be used in the child");
    clock_sleep_us(100);
    return VPMM_SUCCESS;
}

vpmm_status vpmm_pool_default(int device, vpmm_pool **out)
{
    if (!out)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_pool_default: the output is NULL");
    if (device < 0 || device >= DEVICES)
        return fail(VPMM_ERROR_NO_DRIVER, "device %d does not exist: devices are numbered 0 to %d", device,
                    DEVICES - 1);
    vpmm_status status = VPMM_SUCCESS;
    while (status == VPMM_SUCCESS && !load_acquire_ptr(&pools[device]))
        status = make_or_wait(device);
    if (status == VPMM_SUCCESS)
        *out = load_acquire_ptr(&pools[device]);
    return status;
}
