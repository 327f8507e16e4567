#include "base/status.h"

#include "base/atomic.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { MESSAGE_BYTES = 512, KEYLESS_MESSAGES = 64 };

/* The thread's buffer, made at its first failure; no_words: there was no memory for it. NULL: there was no failure. */
static _Thread_local char *message;
static char no_words[] = "there is no host memory for the words of this thread's failures";

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t message_key;
static bool has_key; /* false: other libraries have taken all keys, and a thread's end is not known */

/* Without a key: of the first threads that fail, which keep them for good. */
static char keyless_message[KEYLESS_MESSAGES][MESSAGE_BYTES];
static _Atomic(uint32_t) keyless_messages; /* given away */

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
    return message ? message : "";
}

/* Another key's destructor that fails after this one gets a new buffer, which the next round of destructors frees. */
static void thread_exits(void *buffer)
{
    free(buffer);
    message = NULL;
}

static void make_key(void)
{
    has_key = pthread_key_create(&message_key, thread_exits) == 0;
}

static char *take_keyless(void)
{
    if (load_relaxed_u32(&keyless_messages) >= KEYLESS_MESSAGES)
        return NULL;
    uint32_t index = fetch_add_relaxed_u32(&keyless_messages, 1);
    return index < KEYLESS_MESSAGES ? keyless_message[index] : NULL;
}

/* NULL: no memory. */
static char *make_buffer(void)
{
    pthread_once(&once, make_key);
    if (!has_key)
        return take_keyless();
    char *buffer = malloc(MESSAGE_BYTES);
    if (buffer && pthread_setspecific(message_key, buffer)) {
        free(buffer);
        return NULL;
    }
    return buffer;
}

static bool has_buffer(void)
{
    if (!message || message == no_words) {
        char *buffer = make_buffer();
        message = buffer ? buffer : no_words;
    }
    return message != no_words;
}

/*
 * Formatted beside the buffer first: an argument may be vpmm_last_error() itself, so that a failure can be wrapped in
 * more words. A message that is too long is cut; one that cannot be formatted becomes the status's name.
 */
__attribute__((format(printf, 2, 0))) static vpmm_status say(vpmm_status status, const char *format, va_list arguments)
{
    char text[MESSAGE_BYTES];
    int written = vsnprintf(text, sizeof(text), format, arguments);
    if (has_buffer())
        snprintf(message, MESSAGE_BYTES, "%s", written < 0 ? vpmm_status_name(status) : text);
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
