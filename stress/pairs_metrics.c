#define _GNU_SOURCE 1

#include "pairs.h"

#ifdef VPMM_PAIRS_METRICS

bool metrics_known(void)
{
    return true;
}

/* On loopback, for whoever measures what scrapes do to the pairs: what a client may ask for is not the limit. */
bool metrics_open(const pairs_options *o, vpmm_exporter **exporter)
{
    enum { REQUESTS_PER_SECOND = 100000 }; /* the most that is allowed */
    vpmm_exporter_config config = vpmm_exporter_config_default();
    *exporter = NULL;
    if (o->metrics_port < 0)
        return true;
    config.port = (uint16_t)o->metrics_port;
    config.limits.requests_per_second = REQUESTS_PER_SECOND;
    if (!vpmm_ok("--metrics-port", vpmm_exporter_start(&config, exporter)))
        return false;
    fprintf(stderr, "metrics: port %u of %s, /metrics\n", vpmm_exporter_port(*exporter), config.address);
    return true;
}

bool metrics_add(vpmm_exporter *exporter, vpmm_pool *pool)
{
    return exporter == NULL || vpmm_ok("vpmm_exporter_add", vpmm_exporter_add(exporter, pool, "pairs"));
}

bool metrics_remove(vpmm_exporter *exporter, vpmm_pool *pool)
{
    return exporter == NULL || vpmm_ok("vpmm_exporter_remove", vpmm_exporter_remove(exporter, pool));
}

bool metrics_close(vpmm_exporter *exporter)
{
    return vpmm_ok("vpmm_exporter_stop", vpmm_exporter_stop(exporter));
}

#else

bool metrics_known(void)
{
    return false;
}

/* None is ever wanted: the option is refused. */
bool metrics_open(const pairs_options *o, vpmm_exporter **exporter)
{
    (void)o;
    *exporter = NULL;
    return true;
}

bool metrics_add(vpmm_exporter *exporter, vpmm_pool *pool)
{
    (void)exporter, (void)pool;
    return true;
}

bool metrics_remove(vpmm_exporter *exporter, vpmm_pool *pool)
{
    (void)exporter, (void)pool;
    return true;
}

bool metrics_close(vpmm_exporter *exporter)
{
    (void)exporter;
    return true;
}

#endif
