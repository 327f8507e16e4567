#include "negotiate.h"

#include <stddef.h>
#include <string.h>
#include <strings.h>

/* ---- elements: value *( ";" name "=" value ), separated by commas ---- */

struct span {
    const char *at;
    size_t count;
};

static bool is_space(char c)
{
    return c == ' ' || c == '\t';
}

static struct span trimmed(const char *at, const char *end)
{
    while (at < end && is_space(*at))
        at++;
    while (end > at && is_space(end[-1]))
        end--;
    return (struct span){at, (size_t)(end - at)};
}

static bool equals(struct span span, const char *word)
{
    return span.count == strlen(word) && !strncasecmp(span.at, word, span.count);
}

/* Up to one of the stops that is not inside a quoted string, or the end. */
static const char *until(const char *at, const char *stops)
{
    bool quoted = false;
    for (; *at && (quoted || !strchr(stops, *at)); at++) {
        if (quoted && *at == '\\' && at[1])
            at++;
        else if (*at == '"')
            quoted = !quoted;
    }
    return at;
}

static struct span unquoted(struct span value)
{
    if (value.count >= 2 && value.at[0] == '"' && value.at[value.count - 1] == '"')
        return (struct span){value.at + 1, value.count - 2};
    return value;
}

/* "0", "0.5", "1.000": at most three decimals, at most 1. -1 if it is none of these. */
static int parse_q(struct span text)
{
    int q = 0, worth = 1000;
    if (!text.count || (text.at[0] != '0' && text.at[0] != '1') || text.count > 5 ||
        (text.count > 1 && text.at[1] != '.'))
        return -1;
    for (size_t i = 0; i < text.count; i++) {
        if (i == 1)
            continue;
        if (text.at[i] < '0' || text.at[i] > '9')
            return -1;
        q += (text.at[i] - '0') * worth;
        worth /= 10;
    }
    return q <= 1000 ? q : -1;
}

struct element {
    struct span value, version; /* version.at NULL: not given */
    int q;                      /* -1: not a weight */
};

static void read_parameter(struct element *element, const char *at, const char *end)
{
    const char *equal = memchr(at, '=', (size_t)(end - at));
    if (!equal)
        return;
    struct span name = trimmed(at, equal), value = unquoted(trimmed(equal + 1, end));
    if (equals(name, "q"))
        element->q = parse_q(value);
    else if (equals(name, "version"))
        element->version = value;
}

/* Where the next element begins; NULL after the last. */
static const char *read_element(const char *at, struct element *element)
{
    const char *end = until(at, ",;");
    *element = (struct element){.value = trimmed(at, end), .q = 1000};
    while (*end == ';') {
        at = end + 1;
        end = until(at, ",;");
        read_parameter(element, at, end);
    }
    return *end ? end + 1 : NULL;
}

/* ---- formats ---- */

enum format_index { TEXT, OPENMETRICS };

static const struct {
    const char *group, *type, *version;
} formats[ACCEPT_FORMATS] = {
    [TEXT] = {"text/*", "text/plain", "0.0.4"},
    [OPENMETRICS] = {"application/*", "application/openmetrics-text", "1.0.0"},
};

struct accept accept_nothing(void)
{
    return (struct accept){{-1, -1}, {-1, -1}};
}

/* -1: the element does not match the format. */
static int specificity(const struct element *element, enum format_index format)
{
    if (equals(element->value, "*/*"))
        return 0;
    if (equals(element->value, formats[format].group))
        return 1;
    if (!equals(element->value, formats[format].type))
        return -1;
    if (!element->version.at)
        return 2;
    return equals(element->version, formats[format].version) ? 3 : -1;
}

static void weigh(struct accept *accept, const struct element *element, enum format_index format)
{
    int found = specificity(element, format);
    if (found < 0 || element->q < 0 || found < accept->specificity[format])
        return;
    if (found > accept->specificity[format] || element->q > accept->q[format])
        accept->q[format] = element->q;
    accept->specificity[format] = found;
}

void accept_read(struct accept *accept, const char *header)
{
    struct element element;
    while (header) {
        header = read_element(header, &element);
        weigh(accept, &element, TEXT);
        weigh(accept, &element, OPENMETRICS);
    }
}

bool accept_prefers_openmetrics(const struct accept *accept)
{
    return accept->q[OPENMETRICS] > 0 && accept->q[OPENMETRICS] > accept->q[TEXT];
}

/* ---- codings ---- */

struct accept_coding accept_coding_nothing(void)
{
    return (struct accept_coding){-1, -1};
}

void accept_coding_read(struct accept_coding *coding, const char *header)
{
    struct element element;
    while (header) {
        header = read_element(header, &element);
        if (equals(element.value, "gzip") || equals(element.value, "x-gzip"))
            coding->gzip = element.q > coding->gzip ? element.q : coding->gzip;
        else if (equals(element.value, "*"))
            coding->any = element.q;
    }
}

bool accept_coding_allows_gzip(const struct accept_coding *coding)
{
    return (coding->gzip >= 0 ? coding->gzip : coding->any) > 0;
}
