#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

#define MESSAGE_BYTES 512

static _Thread_local char message[MESSAGE_BYTES];

const char *vpmm_status_name(vpmm_status status)
{
#define NAME_OF(enumerator)                                                                                            \
    case enumerator:                                                                                                   \
        return #enumerator;
    switch (status) {
        NAME_OF(VPMM_SUCCESS)
        NAME_OF(VPMM_ERROR_INVALID_VALUE)
        NAME_OF(VPMM_ERROR_INVALID_POINTER)
        NAME_OF(VPMM_ERROR_OUT_OF_MEMORY)
        NAME_OF(VPMM_ERROR_OUT_OF_ADDRESS_SPACE)
        NAME_OF(VPMM_ERROR_NOT_SUPPORTED)
        NAME_OF(VPMM_ERROR_NO_DRIVER)
        NAME_OF(VPMM_ERROR_DRIVER)
        NAME_OF(VPMM_ERROR_BUSY)
        NAME_OF(VPMM_ERROR_HOST_MEMORY)
    }
#undef NAME_OF
    return "VPMM_ERROR_UNKNOWN";
}

const char *vpmm_last_error(void)
{
    return message;
}

/*
 * Formatted beside the buffer first: an argument may be vpmm_last_error() itself, so that a failure can be wrapped in
 * more words. A message that is too long is cut; one that cannot be formatted becomes the status's name.
 */
__attribute__((format(printf, 2, 0))) static vpmm_status say(vpmm_status status, const char *format, va_list arguments)
{
    char text[MESSAGE_BYTES];
    int written = vsnprintf(text, sizeof(text), format, arguments);
    snprintf(message, sizeof(message), "%s", written < 0 ? vpmm_status_name(status) : text);
    return status;
}

vpmm_status fail(vpmm_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(status, format, arguments);
    va_end(arguments);
    return status;
}

vpmm_status vpmm_error_set(vpmm_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(status, format, arguments);
    va_end(arguments);
    return status;
}
