/*
 * need.hpp - for the tests in C++: what has to hold, and a line for what does not. main returns `failed`.
 */
#ifndef VPMM_TESTS_NEED_HPP
#define VPMM_TESTS_NEED_HPP

#include <cstdio>

static int failed;

static void need(bool holds, const char *what)
{
    if (holds)
        return;
    std::printf("%s\n", what);
    failed = 1;
}

#endif
