/*
 * Memory pools that are kept instead of destroyed, over a driver that says what it reserves as it is told. A pool here
 * is a number, and handed out once by the driver.
 */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "driver/kept_pools.h"

enum { POOLS = 4096 };

static struct pool {
    atomic_int reserved, owners;
    atomic_bool destroyed;
    uint64_t threshold, highest;
    int follows;
} pool[POOLS];
static atomic_int made, trims;
static int comes_back; /* the handle that the driver gives next; 0: a new one */
static CUresult destroy_answer;

static struct pool *of(CUmemoryPool handle)
{
    return &pool[(uintptr_t)handle];
}

static CUresult CUDAAPI fake_create(CUmemoryPool *out, const CUmemPoolProps *props)
{
    (void)props;
    int n = comes_back ? comes_back : atomic_fetch_add(&made, 1) + 1;
    cr_assert_lt(n, POOLS);
    pool[n].follows = 1;
    *out = (CUmemoryPool)(uintptr_t)n;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI fake_destroy(CUmemoryPool handle)
{
    cr_expect_not(atomic_load(&of(handle)->destroyed), "twice");
    cr_expect_eq(atomic_load(&of(handle)->reserved), 0, "with memory of it reserved");
    if (destroy_answer == CUDA_SUCCESS)
        atomic_store(&of(handle)->destroyed, true);
    return destroy_answer;
}

static CUresult CUDAAPI fake_trim(CUmemoryPool handle, size_t keep)
{
    (void)handle;
    cr_expect_eq(keep, 0);
    atomic_fetch_add(&trims, 1);
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI fake_get(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    cr_expect_eq(attribute, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    if (atomic_load(&of(handle)->reserved) < 0)
        return CUDA_ERROR_UNKNOWN;
    *(cuuint64_t *)value = (cuuint64_t)atomic_load(&of(handle)->reserved);
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI fake_set(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        of(handle)->threshold = *(cuuint64_t *)value;
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        of(handle)->highest = *(cuuint64_t *)value;
    if (attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES)
        of(handle)->follows = *(int *)value;
    return CUDA_SUCCESS;
}

static const vpmm_driver driver = {.cuMemPoolCreate = fake_create,
                                   .cuMemPoolDestroy = fake_destroy,
                                   .cuMemPoolTrimTo = fake_trim,
                                   .cuMemPoolGetAttribute = fake_get,
                                   .cuMemPoolSetAttribute = fake_set};

static CUmemPoolProps props_of(int device)
{
    return (CUmemPoolProps){.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
}

static CUmemoryPool create(CUmemPoolProps props)
{
    CUmemoryPool handle = NULL;
    cr_assert_eq(kept_pools_create(&driver, &handle, &props), CUDA_SUCCESS);
    return handle;
}

static void destroy(CUmemoryPool handle)
{
    cr_assert_eq(kept_pools_destroy(&driver, handle), CUDA_SUCCESS);
}

Test(kept_pools, an_empty_pool_is_destroyed)
{
    CUmemoryPool handle = create(props_of(0));
    destroy(handle);
    cr_assert(of(handle)->destroyed);
}

Test(kept_pools, one_with_pending_frees_is_the_next_one_made_as_new)
{
    CUmemoryPool handle = create(props_of(0));
    of(handle)->threshold = UINT64_MAX;
    of(handle)->highest = 64;
    of(handle)->follows = 0;
    of(handle)->reserved = 32;
    destroy(handle);
    cr_assert_eq(of(handle)->highest, 0);
    cr_assert_not(of(handle)->destroyed);
    cr_assert_eq(of(handle)->threshold, 0, "the driver may release what it reserves");
    CUmemoryPool next = create(props_of(0));
    cr_assert_eq(next, handle);
    cr_assert_eq(of(handle)->follows, 1);
    cr_assert_neq(create(props_of(0)), handle, "it is kept no more");
}

/* As after a reset of the device: the handle is the new pool's alone. */
Test(kept_pools, one_whose_handle_comes_back_is_no_more)
{
    CUmemoryPool handle = create(props_of(0));
    of(handle)->reserved = 32;
    destroy(handle);
    comes_back = (int)(uintptr_t)handle;
    cr_assert_eq(create(props_of(1)), handle);
    comes_back = 0;
    cr_assert_neq(create(props_of(0)), handle, "two owners");
}

Test(kept_pools, one_of_another_device_is_not_handed_out)
{
    CUmemoryPool handle = create(props_of(0));
    of(handle)->reserved = 32;
    destroy(handle);
    cr_assert_neq(create(props_of(1)), handle);
    cr_assert_eq(create(props_of(0)), handle);
}

Test(kept_pools, a_kept_one_goes_when_it_has_become_empty)
{
    CUmemoryPool first = create(props_of(0)), second = create(props_of(0));
    of(first)->reserved = 32;
    destroy(first);
    destroy(second);
    cr_assert_not(of(first)->destroyed);
    of(first)->reserved = 0;
    destroy(create(props_of(1)));
    cr_assert(of(first)->destroyed);
}

Test(kept_pools, what_the_driver_would_not_tell_of_is_not_destroyed)
{
    CUmemoryPool handle = create(props_of(0));
    of(handle)->reserved = -1;
    destroy(handle);
    cr_assert_not(of(handle)->destroyed);
}

Test(kept_pools, one_that_the_driver_knows_no_more_is_forgotten)
{
    CUmemoryPool gone = create(props_of(0)), handle = create(props_of(0));
    of(gone)->reserved = of(handle)->reserved = 32;
    destroy(handle);
    destroy(gone);
    of(gone)->reserved = -1;
    cr_assert_eq(create(props_of(0)), handle);
    of(gone)->reserved = 32;
    cr_assert_neq(create(props_of(0)), gone);
}

Test(kept_pools, shared_pools_go_straight_to_the_driver)
{
    CUmemPoolProps shared = props_of(0);
    shared.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemoryPool handle = create(shared);
    destroy(handle);
    cr_assert(of(handle)->destroyed);
    cr_assert_eq(atomic_load(&trims), 0);
}

Test(kept_pools, a_refused_one_is_still_the_programs)
{
    CUmemoryPool handle = create(props_of(0));
    of(handle)->threshold = UINT64_MAX;
    destroy_answer = CUDA_ERROR_NOT_PERMITTED;
    cr_assert_eq(kept_pools_destroy(&driver, handle), CUDA_ERROR_NOT_PERMITTED);
    cr_assert_eq(of(handle)->threshold, UINT64_MAX, "its attributes are the program's");
    cr_assert_neq(create(props_of(0)), handle);
    destroy_answer = CUDA_SUCCESS;
    destroy(handle);
    cr_assert(of(handle)->destroyed);
}

static void *make_and_destroy(void *seed)
{
    unsigned random = (unsigned)(uintptr_t)seed;
    for (int i = 0; i < 800; i++) {
        CUmemoryPool handle = create(props_of(0));
        cr_assert_eq(atomic_fetch_add(&of(handle)->owners, 1), 0, "two have it");
        random = random * 1664525 + 1013904223;
        atomic_store(&of(handle)->reserved, random >> 16 & 3 ? 0 : 32);
        atomic_fetch_sub(&of(handle)->owners, 1);
        destroy(handle);
    }
    return NULL;
}

Test(kept_pools, nobody_is_given_what_another_has)
{
    enum { THREADS = 4 };
    pthread_t thread[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, make_and_destroy, (void *)(i + 1)), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    for (int n = 1; n <= atomic_load(&made); n++) /* what is kept is gone once it is empty */
        atomic_store(&pool[n].reserved, 0);
    destroy(create(props_of(0)));
    destroy(create(props_of(1)));
    for (int n = 1; n <= atomic_load(&made); n++)
        cr_expect(atomic_load(&pool[n].destroyed), "pool %d is left", n);
}
