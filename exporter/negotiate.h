/*
 * negotiate.h - which format and which coding a request prefers (RFC 9110, 12.5).
 *
 * A header's elements are read one after the other into a struct accept, so that a header that is sent in several lines
 * counts as one. Of the ranges that match a format the most specific one says its weight, q, in thousandths; a format
 * that nothing matches has none. The text format is served unless OpenMetrics weighs more: an element that cannot be
 * parsed matches nothing, and a client that accepts neither is given the text as well, which every scraper reads.
 *
 * Pure functions over strings of any content; no allocation.
 */
#ifndef VPMM_EXPORTER_NEGOTIATE_H
#define VPMM_EXPORTER_NEGOTIATE_H

#include <stdbool.h>

enum { ACCEPT_FORMATS = 2 };

struct accept {
    int q[ACCEPT_FORMATS];           /* -1: nothing has matched */
    int specificity[ACCEPT_FORMATS]; /* of what has: 0 any, 1 of its type, 2 exact, 3 exact with the version */
};

struct accept accept_nothing(void);
void accept_read(struct accept *, const char *header);
bool accept_prefers_openmetrics(const struct accept *);

/* Accept-Encoding: the weights of gzip (or x-gzip) and of *, in thousandths; 0 forbids. */
struct accept_coding {
    int gzip, any; /* -1: not named */
};
struct accept_coding accept_coding_nothing(void);
void accept_coding_read(struct accept_coding *, const char *header);
bool accept_coding_allows_gzip(const struct accept_coding *);

#endif
