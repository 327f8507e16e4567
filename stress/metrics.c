#include "metrics.h"

#include "target.h"

#include <stdio.h>

#ifdef VPMM_METRICS

bool metrics_known(void)
{
    return true;
}

bool metrics_open(int port, const char *address, unsigned requests_per_second, vpmm_exporter **exporter)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    *exporter = NULL;
    if (port < 0)
        return true;
    config.port = (uint16_t)port;
    if (address != NULL)
        config.address = address;
    if (requests_per_second != 0)
        config.limits.requests_per_second = requests_per_second;
    if (!vpmm_ok("the metrics' port", vpmm_exporter_start(&config, exporter)))
        return false;
    fprintf(stderr, "metrics: port %u of %s, /metrics\n", vpmm_exporter_port(*exporter), config.address);
    return true;
}

bool metrics_add(vpmm_exporter *exporter, vpmm_pool *pool, const char *name)
{
    return exporter == NULL || vpmm_ok("vpmm_exporter_add", vpmm_exporter_add(exporter, pool, name));
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
    fprintf(stderr,
            "%s: this program was built without the exporter: install libmicrohttpd-dev, libgnutls28-dev, zlib1g-dev "
            "and libcrypt-dev, and build again\n",
            program_name);
    return false;
}

/* None is ever wanted: the option is refused. */
bool metrics_open(int port, const char *address, unsigned requests_per_second, vpmm_exporter **exporter)
{
    (void)port, (void)address, (void)requests_per_second;
    *exporter = NULL;
    return true;
}

bool metrics_add(vpmm_exporter *exporter, vpmm_pool *pool, const char *name)
{
    (void)exporter, (void)pool, (void)name;
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
