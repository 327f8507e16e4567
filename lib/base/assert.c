#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>

void assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "vpmm: %s:%d: the assertion does not hold: %s\n", file, line, condition);
    abort();
}
