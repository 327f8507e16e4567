#include "option.h"

#include "size.h"
#include "target.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

bool option_refuse(const char *option, const char *value, const char *allowed)
{
    fprintf(stderr, "%s: --%s '%s': %s\n", program_name, option, value, allowed);
    return false;
}

bool option_number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *out)
{
    char allowed[128];
    size_describe(allowed, sizeof allowed, min, max);
    return size_parse(text, min, max, out) || option_refuse(option, text, allowed);
}

bool option_count(const char *option, const char *text, unsigned min, unsigned max, unsigned *out)
{
    uint64_t value;
    if (!option_number(option, text, min, max, &value))
        return false;
    *out = (unsigned)value;
    return true;
}

bool option_factor(const char *option, const char *text, double least, double most, double *out)
{
    char *end, allowed[80];
    double value = strtod(text, &end);
    snprintf(allowed, sizeof allowed, "a factor from %g to %g is allowed", least, most);
    if (end == text || *end != '\0' || !isfinite(value) || value < least || value > most)
        return option_refuse(option, text, allowed);
    *out = value;
    return true;
}

bool output_is_whole(void)
{
    bool whole = fflush(stdout) == 0 && !ferror(stdout);
    if (!whole)
        fprintf(stderr, "%s: standard output cannot be written: %s\n", program_name, strerror(errno));
    return whole;
}
