#include "text.h"

#include <stdlib.h>
#include <string.h>

void text_free(struct text *text)
{
    free(text->bytes);
    *text = (struct text){.bound = text->bound};
}

void text_clear(struct text *text)
{
    text->used = 0;
    text->cut = false;
}

static bool make_room(struct text *text, size_t count)
{
    if (count <= text->capacity - text->used)
        return true;
    size_t capacity = text->capacity ? text->capacity : 4096;
    while (capacity - text->used < count && capacity < text->bound)
        capacity *= 2;
    if (capacity > text->bound)
        capacity = text->bound;
    char *larger = capacity - text->used < count ? NULL : realloc(text->bytes, capacity);
    if (!larger)
        return false;
    text->bytes = larger;
    text->capacity = capacity;
    return true;
}

void text_append(struct text *text, const char *bytes, size_t count)
{
    text->cut = text->cut || !make_room(text, count);
    if (text->cut || !count)
        return;
    memcpy(text->bytes + text->used, bytes, count);
    text->used += count;
}

void text_string(struct text *text, const char *string)
{
    text_append(text, string, strlen(string));
}

void text_u64(struct text *text, uint64_t number)
{
    char digits[20], *end = digits + sizeof digits, *first = end;
    do
        *--first = (char)('0' + number % 10);
    while (number /= 10);
    text_append(text, first, (size_t)(end - first));
}

void text_seconds(struct text *text, uint64_t ns)
{
    char decimals[10] = ".";
    uint64_t rest = ns % 1000000000;
    size_t count = 10;
    text_u64(text, ns / 1000000000);
    if (!rest)
        return;
    for (int i = 9; i > 0; i--, rest /= 10)
        decimals[i] = (char)('0' + rest % 10);
    while (decimals[count - 1] == '0')
        count--;
    text_append(text, decimals, count);
}

void text_label(struct text *text, const char *value)
{
    for (size_t plain; *value; value += plain) {
        plain = strcspn(value, "\\\"\n");
        text_append(text, value, plain);
        if (!value[plain])
            return;
        text_append(text, value[plain] == '\n' ? "\\n" : value[plain] == '"' ? "\\\"" : "\\\\", 2);
        plain++;
    }
}
