#define _GNU_SOURCE 1

#include "replay.h"

#include <stdlib.h>

bool lag_open(lag_window *lag, vpmm_sim *sim, size_t events, size_t streams)
{
    *lag = (lag_window){.sim = sim, .events = events, .streams = streams};
    if (sim == NULL)
        return true;
    lag->added = calloc(events * streams + 1, sizeof *lag->added);
    lag->held = calloc(streams, sizeof *lag->held);
    lag->pending = calloc(streams, sizeof *lag->pending);
    return lag->added != NULL && lag->held != NULL && lag->pending != NULL;
}

void lag_close(lag_window *lag)
{
    free(lag->added);
    free(lag->held);
    free(lag->pending);
    *lag = (lag_window){0};
}

static uint32_t *added_at(lag_window *lag, size_t event, size_t stream)
{
    return &lag->added[event % lag->events * lag->streams + stream];
}

/* The oldest operations of the window have run already: takes them out until no more than `pending` are left. */
static void drop_oldest(lag_window *lag, size_t stream, size_t pending)
{
    for (size_t i = 1; i <= lag->events && lag->held[stream] > pending; i++) {
        uint32_t *added = added_at(lag, lag->position + i, stream);
        size_t gone = lag->held[stream] - pending < *added ? lag->held[stream] - pending : *added;
        *added -= (uint32_t)gone;
        lag->held[stream] -= gone;
    }
}

/* Enters what the last event queued on the stream in place of what the event `events` before it did. */
static void note_stream(lag_window *lag, size_t stream, size_t pending)
{
    if (lag->events == 0)
        return;
    uint32_t *added = added_at(lag, lag->position, stream);
    size_t before = lag->pending[stream];
    lag->held[stream] -= *added;
    *added = pending > before ? (uint32_t)(pending - before) : 0;
    lag->held[stream] += *added;
    drop_oldest(lag, stream, pending);
}

/* Runs what is older than the window. How many operations ran. */
static size_t run_stream(lag_window *lag, size_t stream, CUstream handle)
{
    size_t pending = vpmm_sim_pending(lag->sim, handle);
    size_t ran = 0;
    if (pending > lag->held[stream])
        ran = vpmm_sim_step(lag->sim, handle, pending - lag->held[stream]);
    lag->pending[stream] = pending - ran;
    return ran;
}

void lag_advance(lag_window *lag, const CUstream *streams)
{
    if (lag->sim == NULL)
        return;
    for (size_t s = 0; s < lag->streams; s++)
        note_stream(lag, s, vpmm_sim_pending(lag->sim, streams[s]));
    size_t ran;
    do { /* again, since a stream may have waited for another one */
        ran = 0;
        for (size_t s = 0; s < lag->streams; s++)
            ran += run_stream(lag, s, streams[s]);
    } while (ran != 0 && lag->streams > 1);
    lag->position++;
}
