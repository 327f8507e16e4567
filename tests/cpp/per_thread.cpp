/*
 * vpmm.hpp where stream 0 is each thread's own: its classes are others than elsewhere, so that a program that is made
 * of both kinds of files links, and each file calls its own functions.
 */
#define CUDA_API_PER_THREAD_DEFAULT_STREAM

#include <vpmm/vpmm.hpp>

#include "need.hpp"

#include <typeinfo>

#include <vpmm/sim.h>

static bool is_per_thread(const std::type_info &type)
{
    return std::string(type.name()).find("per_thread_default_stream") != std::string::npos;
}

int main()
{
    vpmm_sim *sim = vpmm_sim_create(nullptr);
    vpmm_config config = vpmm_config_default();
    CUcontext context;
    need(sim != nullptr, "the simulated GPU can be made");
    need(is_per_thread(typeid(vpmm::pool)) && is_per_thread(typeid(vpmm::buffer)) &&
             is_per_thread(typeid(vpmm::resource)),
         "the classes have names of their own");
    if (failed)
        return failed;
    config.driver = vpmm_sim_driver(sim);
    config.driver->cuInit(0);
    config.driver->cuDevicePrimaryCtxRetain(&context, 0);
    config.driver->cuCtxSetCurrent(context);
    {
        vpmm::pool pool(config);
        vpmm::buffer buffer(pool, 4096, nullptr);
        need(pool.stats().requested_bytes == 4096, "stream 0 is the thread's own");
    }
    config.driver->cuDevicePrimaryCtxRelease(0);
    need(vpmm_sim_destroy(sim) == 0, "nothing leaks");
    return failed;
}
