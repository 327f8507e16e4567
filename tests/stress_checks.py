#!/usr/bin/env python3
"""usage: tests/stress_checks.py BUILD_DIR

What vpmm-stress says is true, on the simulated GPU: it passes, with and without planned faults, and with other
settings; it finds each defect that is planted, and says what it is; one seed gives each thread the same steps again;
SIGTERM ends it in time; each outcome has its exit status; and no earlier result stays in the file of one that did not
come to its end, vpmm-fragment's neither. The shim for PyTorch says why there is no pool. Exit status: 0 if all of it
holds.
"""
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

PASSED, FAILED, USAGE, DEVICE_ERROR, SKIPPED, TERMINATED = 0, 1, 2, 3, 77, 143
END_WITHIN_S = 10
TRIES = 5  # to end within it: a busy machine may stand still meanwhile, but not each time
# Streams that race on the simulated GPU are threads that do, and a run that failed leaves its threads: that
# ThreadSanitizer sees it, too, is no finding.
UNWATCHED = {"TSAN_OPTIONS": "report_bugs=0"}
# A defect that is planted in the release of handles needs a pool that releases some.
RELEASING = {"VPMM_DECAY_MS": "20"}
UNFINISHED = "0" * 16  # of a thread's first round
LARGEST_CAP = 8 << 30  # half of the simulated GPU
BESIDE_LANES = ("on_the_default_stream", "on_a_threads_default_stream", "polls", "settings_changed", "statistics_read",
                "attributes_read", "health_read", "ranges_visited", "allocations_visited", "calls_read",
                "served_beside_a_park", "refused_by_a_park")  # paths, by what a run does beside mallocs and frees
LEAST_HELD = 0.9  # it is looked at now and then
WORDS = {  # of each defect's finding
    "reuse": ("races", "does not hold", "misuses", "ILLEGAL_ADDRESS"),
    "lost-page": ("handed out",),
    "double-map": ("does not hold", "races"),
    "unmapped": ("ILLEGAL_ADDRESS", "misuses", "does not hold", "lost"),
    "count": ("handed out",),
    "bit": ("does not hold",),
}
failures = []


def check(good, what, *more):
    if not good:
        failures.append(what)
        print("FAILED:", what, *more)


def run(program, *arguments, **environment):
    """The exit status and the result, which is None where there is no JSON."""
    ended = subprocess.run([program, "--json", "-", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env={**os.environ, **environment}, timeout=900)
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else None, ended.stderr.decode()


def took_all_paths(result):
    """What a run is there for: a slow machine needs more time until it has done each of it once."""
    refused, did, paths = result["refused_on_purpose"], result["operations"], result.get("paths", {})
    return (all(refused[call] for call in ("cuMemMap", "cuMemSetAccess", "cuEventRecord", "host_memory")) and
            did["taken"] and did["used"] and did["accesses"] and result["longest_disturbances_us"]["access"] > 0 and
            paths.get("regions_split") and paths.get("slabs_adopted") and all(paths[path] for path in BESIDE_LANES))


def run_with_faults(program):
    for seed, seconds in ("1", "8"), ("2", "24"), ("3", "72"), ("4", "216"):
        status, said, errors = run(program, "--seconds", seconds, "--seed", seed, "--faults")
        result = said["results"][0] if said else {}
        check(status == PASSED and said["outcome"] == "passed" and result["audit"], "a run with faults passes", errors)
        refused = result.get("refused_on_purpose", {})
        if refused and took_all_paths(result):
            return said, result, refused
    check(False, "driver calls and host memory were refused, and all paths taken", said)
    return said, result, refused


def check_passes(program):
    said, result, refused = run_with_faults(program)
    check("threads" in refused and "pools" in result["operations"],
          "the result counts threads refused, and other pools", refused)
    operations = result.get("operations", {})
    check(operations.get("taken"), "memory went from thread to thread", result)
    check(operations.get("used") and operations.get("accesses"),
          "streams used what others freed, and another device was lent access", operations)
    times = result["threads_time"]
    check(all(0 <= part <= 1 for part in times.values()) and times["malloc"] and sum(times.values()) < 1.05,
          "the result says what the threads' time went to", times)
    longest = result["longest_mallocs"]
    slowest = max(one["us"] for one in longest.values() if one)
    check(slowest <= result["malloc_us"]["longest"] + 0.01, "the longest malloc is one of the mallocs", longest, result)
    check(bool(longest["refused"]) == bool(result["operations"]["refused"]), "who was refused is told apart", longest)
    check(all(0 <= one["at_seconds"] <= result["seconds"] and one["bytes"] and one["thread"] < 4 and
              one["pattern"] in said["options"]["patterns"] and one["cap_lowered"] == (one["cap_bytes"] < LARGEST_CAP)
              for one in longest.values() if one), "the longest mallocs are described", longest)
    took = result["longest_disturbances_us"]
    check(all(what in took for one in longest.values() if one for what in one["beside"]),
          "what was under way beside them is named", longest, took)
    check(took["access"] > 0, "the result says how long changes of access took", took)
    check(result["driver_calls"].get("cuMemMap"), "the result says which driver calls were made", result)
    paths = result.get("paths", {})
    check(paths.get("regions_split") and paths.get("slabs_adopted"), "rare paths were taken and counted", paths)
    steps = {"unwound_create": "cuMemCreate", "unwound_map": "cuMemMap", "unwound_access": "cuMemSetAccess"}
    check(all(paths[path] == refused[call] for path, call in steps.items()),
          "what was unwound is what was refused", paths, refused)


def check_settings(program):
    for settings in ({"VPMM_CAPTURES": "1"}, {"VPMM_STREAMS": "eager"}, {"VPMM_REUSE": "completed"},
                     {"VPMM_REUSE": "host"}, {"VPMM_SMALL": "async"}, {"VPMM_EXTENT_SIZE": "2M"},
                     {"VPMM_PAGE_SIZE": "256K"}, {"VPMM_MAX_MAPPED": "8M"}):
        status, said, errors = run(program, "--seconds", "3", "--seed", "3", **settings)
        check(status == PASSED and said["results"][0]["audit"], f"a run with {settings} passes", errors)
    said = run(program, "--seconds", "3", "--seed", "3", "--pattern", "larson", VPMM_SMALL="async")[1]
    held = said["results"][0]["held"]
    check(held > LEAST_HELD, "what the driver's pool has live for small requests is held", held)


def run_planted(program, defect):
    """Until it is found, some at the end alone: a slow machine needs more time until one has been made."""
    for seconds in "10", "40", "160":
        found = run(program, "--seconds", seconds, "--seed", "2", "--plant", defect, **UNWATCHED,
                    **(RELEASING if defect == "lost-page" else {}))
        if found[0] == FAILED:
            break
    return found


def check_planted(program):
    for defect, words in WORDS.items():
        status, said, errors = run_planted(program, defect)
        result = said["results"][0]
        check(status == FAILED and result["outcome"] == "failed", f"the planted defect {defect} is found", errors)
        check(any(word in result["message"] for word in words), f"{defect} is called by its name", result["message"])
        if defect == "bit":
            check("a single bit" in result["finding"], "a flipped bit is called one", result["finding"])


def check_lost_device(program):
    begun = time.monotonic()
    status, said, errors = run(program, "--seconds", "300", "--plant", "lost-device", **UNWATCHED)
    message = said["results"][0]["message"]
    check(status == DEVICE_ERROR and ("lost" in message or "700" in message), "a lost device is called one", message)
    check(time.monotonic() - begun < 250, "nothing hangs on a lost device", time.monotonic() - begun)
    check(said["results"][0]["held"] >= 0.9, "what was held is known of a lost device, too", said["results"][0])


def sequences(program, seed):
    """The first round of each of two threads, which a slow machine needs more time for; serving alone is quick."""
    for seconds in ("5", "20", "80"):
        said = run(program, "--seconds", seconds, "--seed", seed, "--threads", "2", "--pattern", "serving")[1]
        first = said["results"][0]["sequences"]
        if UNFINISHED not in first:
            break
    return first


def check_seed(program):
    first, again, other = (sequences(program, seed) for seed in ("7", "7", "8"))
    check(first == again and UNFINISHED not in first, "a seed gives the same steps again", first, again)
    check(first != other, "another seed gives others", first, other)


def end_by_signal(program):
    """What it says, and how long its end took: once it runs, which it says each second at first."""
    running = subprocess.Popen([program, "--seconds", "600", "--json", "-"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    running.stderr.readline()
    time.sleep(2)
    begun = time.monotonic()
    running.send_signal(signal.SIGTERM)
    said = json.loads(running.communicate(timeout=300)[0])
    return running, said, time.monotonic() - begun


def check_end(program):
    running, said, took = end_by_signal(program)
    for _ in range(1, TRIES):
        if took < END_WITHIN_S:
            break
        running, said, took = end_by_signal(program)
    check(running.returncode == TERMINATED and said["results"][0]["audit"], "SIGTERM ends a run as its time does", said)
    check(said["exit"] == TERMINATED and said["outcome"] == "passed", "and not as one that saw all of it", said)
    check(said["cut_short"], "the result says that the run was cut short", said)
    check(took < END_WITHIN_S, f"it ends within {END_WITHIN_S} s", took)


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_statuses(program):
    for arguments in (["--driver", "none"], ["--pattern", "kv,none"], ["--device", "3"], ["--threads", "0"],
                      ["--driver", "cuda", "--faults"], ["--verify", "some"], ["--level", "short"],
                      ["--fraction", "2"], ["extra"], ["--nonsense"], ["--threads", "4", "--streams", "3"],
                      ["--verify", "off", "--plant", "double-map"], ["--pattern", "kv," * 200]):
        status, said, errors = run(program, *arguments)
        check(status == USAGE and not said and "--help" in errors, f"wrong usage: {arguments}", status, errors)
    for setting in {"VPMM_STREAMS": "none"}, {"VPMM_PAGE_SIZE": "3M"}, {"VPMM_PAGES": "9999999"}:
        status, said, errors = run(program, "--seconds", "1", **setting)
        check(status == USAGE and said["exit"] == USAGE and list(setting)[0] in errors, f"a wrong setting: {setting}",
              status, errors)
    ended = subprocess.run([program, "--seconds", "1", "--json", "/nonexistent/file"], stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE)
    check(ended.returncode == USAGE and b"/nonexistent" in ended.stderr, "a file that cannot be written is told")
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([program, "--seconds", "1"], stdout=full, stderr=subprocess.PIPE)
    check(ended.returncode != PASSED and b"standard output" in ended.stderr, "a full standard output is told", ended)
    helped = subprocess.run([program, "--help"], stdout=subprocess.PIPE)
    check(helped.returncode == PASSED and b"Exit status" in helped.stdout, "--help helps")
    status, said, errors = run(program, "--driver", "cuda", "--seconds", "1")
    if has_driver():
        check(status != SKIPPED or "no device" in errors, "with a driver it is not skipped", status, errors)
    else:
        check(status == SKIPPED and "skipped" in errors, "without a driver it is skipped, and says so", status, errors)


def run_over(path, command, **environment):
    """The exit status, and what then stands in the file, where an earlier run had passed."""
    with open(path, "w") as file:
        json.dump({"outcome": "passed", "exit": PASSED, "good": True}, file)
    ended = subprocess.run([*command, "--json", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=900,
                           env={**os.environ, **environment})
    with open(path) as file:
        return ended.returncode, json.load(file)


def check_earlier_result(build):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.json")
        status, said = run_over(path, [build + "/vpmm-stress", "--driver", "cuda", "--seconds", "1"])
        check(said["exit"] == status and (has_driver() or said["outcome"] == "skipped" and "skipped" in said["reason"]),
              "a run that is skipped says so in the file of an earlier one", status, said)
        status, said = run_over(path, [build + "/vpmm-stress", "--seconds", "1"], VPMM_PAGE_SIZE="3M")
        check(said["exit"] == status and said["outcome"] == "could not run",
              "so does one that could not run", status, said)
        small = ["--bytes", "32M", "--large", "64M", "--each", "8M"]
        status, said = run_over(path, [build + "/vpmm-fragment", *small], VPMM_MAX_MAPPED="48M")
        check(status == 1 and said["good"] is False and [step["step"] for step in said["steps"]] == ["filled", "freed"],
              "so does vpmm-fragment, with the steps before the malloc that was refused", status, said)


def check_shim(library):
    """It says why a device has no pool, not that the pool is NULL. No sanitizer's library can be loaded by Python."""
    with open(library, "rb") as file:
        code = file.read()
    if b"__asan_init" in code or b"__tsan_init" in code:
        return
    for name, arguments in ("malloc", "ctypes.c_ssize_t(1), 99, None"), ("free", "None, ctypes.c_ssize_t(1), 99, None"):
        code = f"import ctypes, sys; ctypes.CDLL(sys.argv[1]).vpmm_pytorch_{name}({arguments})"
        said = subprocess.run([sys.executable, "-c", code, library], stderr=subprocess.PIPE)
        check(said.returncode == 0 and said.stderr.startswith(b"vpmm: ") and b"NULL" not in said.stderr,
              f"the shim's {name} says why there is no pool", said.stderr)


def check_pairs(program):
    """64 allocations of 4 KiB and more are in flight; with VPMM_SMALL=async the pool maps nothing for them."""
    command = [program, "--pattern", "window", "--bytes", "4K", "--pairs", "1000", "--json", "-"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                           env={**os.environ, "VPMM_SMALL": "async"})
    peak = json.loads(ended.stdout)["peak_mapped_bytes"]
    check(peak >= 64 * 4096, "what the driver's pool has live for vpmm-pairs is held", peak)


def check_async(program):
    said = run(program, "--seconds", "2", "--allocator", "vpmm,async")[1]
    caps = [result["longest_mallocs"]["served"]["cap_bytes"] for result in said["results"]]
    check(caps[0] and caps[1] is None, "vpmm has a cap, and async none", caps)


def main():
    check_pairs(sys.argv[1] + "/vpmm-pairs")
    check_shim(sys.argv[1] + "/libvpmm_pytorch_shim.so")
    check_earlier_result(sys.argv[1])
    program = sys.argv[1] + "/vpmm-stress"
    for one in (check_statuses, check_seed, check_end, check_planted, check_lost_device, check_passes,
                check_settings, check_async):
        one(program)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
