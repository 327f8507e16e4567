/*
 * A pool and its attributes from C++: what a program in that language includes, links and calls. Exit status 1 and a
 * line for what is not as documented.
 */
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <vpmm/observe.h>
#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

static int failed;

static void need(bool holds, const char *what)
{
    if (holds)
        return;
    std::printf("%s: %s\n", what, vpmm_last_error());
    failed = 1;
}

static bool reads(vpmm_pool *pool, vpmm_attribute attribute, std::uint64_t expected)
{
    std::uint64_t value = ~expected;
    return vpmm_pool_get_attribute(pool, attribute, &value) == VPMM_SUCCESS && value == expected;
}

static void set_and_read(vpmm_pool *pool)
{
    const struct {
        vpmm_attribute attribute;
        std::uint64_t value;
    } all[] = {{VPMM_ATTRIBUTE_RELEASE_THRESHOLD, UINT64_MAX},
               {VPMM_ATTRIBUTE_DECAY_MS, VPMM_DECAY_NEVER},
               {VPMM_ATTRIBUTE_MAX_MAPPED, 1 << 30},
               {VPMM_ATTRIBUTE_REUSE, VPMM_REUSE_COMPLETED},
               {VPMM_ATTRIBUTE_PEAK_MAPPED, 0},
               {VPMM_ATTRIBUTE_PEAK_LIVE, 0},
               {VPMM_ATTRIBUTE_PEAK_REQUESTED, 0}};
    for (const auto &one : all) {
        need(vpmm_pool_set_attribute(pool, one.attribute, one.value) == VPMM_SUCCESS, "an attribute is set");
        need(reads(pool, one.attribute, one.value), "what was set is read");
    }
    need(vpmm_pool_set_attribute(pool, VPMM_ATTRIBUTE_REUSE, 3) == VPMM_ERROR_INVALID_VALUE,
         "a wrong value is refused");
    need(std::strstr(vpmm_last_error(), "VPMM_ATTRIBUTE_REUSE") != nullptr, "the attribute is named");
}

int main()
{
    vpmm_sim *sim = vpmm_sim_create(nullptr);
    need(sim != nullptr, "a simulator");
    vpmm_config config = vpmm_config_default();
    config.driver = vpmm_sim_driver(sim);
    config.release_threshold = 5;
    config.decay_ms = 50;
    vpmm_pool *pool = nullptr;
    need(vpmm_pool_create(&config, &pool) == VPMM_SUCCESS, "a pool");
    if (failed)
        return 1;
    need(reads(pool, VPMM_ATTRIBUTE_RELEASE_THRESHOLD, 5) && reads(pool, VPMM_ATTRIBUTE_DECAY_MS, 50),
         "attributes begin as configured");
    set_and_read(pool);
    need(vpmm_pool_destroy(pool) == VPMM_SUCCESS, "the pool ends");
    need(vpmm_sim_destroy(sim) == 0, "nothing leaks");
    return failed;
}
