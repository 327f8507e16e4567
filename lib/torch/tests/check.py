#!/usr/bin/env python3
"""What PyTorch expects of its allocator, asked of vpmm's. Needs a GPU, PyTorch, and vpmm_torch on PYTHONPATH.

    tests/check.py [-v] [NAME...]        names as unittest takes them: Streams.test_record_stream
"""
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import unittest

import torch
import torch.multiprocessing

import vpmm_torch

if "VPMM_CHECK_AS_NATIVE" not in os.environ:  # the other process of Sharing, where it is to be without vpmm
    vpmm_torch.enable()

MIB = 1 << 20
CYCLES = 200_000_000  # of torch.cuda._sleep: about a tenth of a second


def run_alone(code, **environment):
    """In a process of its own, with these variables: what it printed, and how it ended."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})


def in_use():
    return torch.cuda.memory_allocated()


def freed_while_used(stream):
    """Of a tensor of 7s, freed after record_stream while `stream` still reads it: its address, and what is read."""
    t = torch.full((4 * MIB,), 7, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        result = t.clone()
    t.record_stream(stream)
    return t.data_ptr(), result


class Plain(unittest.TestCase):
    def test_it_is_in_place(self):
        self.assertEqual(torch.cuda.get_allocator_backend(), "vpmm")
        vpmm_torch.enable()  # again: nothing happens

    def test_tensors_hold_what_is_put_into_them(self):
        kept = [torch.full((n,), n, device="cuda") for n in range(1, 2000, 37)]
        for t in kept:
            self.assertTrue(bool((t == t.numel()).all()))

    def test_nothing_is_allocated_for_no_elements(self):
        before = in_use()
        t = torch.empty(0, device="cuda")
        self.assertEqual(t.data_ptr(), 0)
        self.assertEqual(in_use(), before)

    def test_each_thread_may(self):
        def work(n, failed):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(300):
                    t = torch.full((1 + (i * 7919 + n) % 300000,), n, device="cuda")
                    if i % 50 == 0 and not bool((t == n).all()):
                        failed.append(n)
            stream.synchronize()

        failed = []
        threads = [threading.Thread(target=work, args=(n, failed)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failed, [])

    def test_tensors_may_outlive_the_interpreter(self):
        code = ("import vpmm_torch, torch; vpmm_torch.enable()\n"
                "import builtins; builtins.kept = torch.ones(1 << 20, device='cuda')\n")
        done = run_alone(code)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_it_may_be_disabled(self):
        gc.collect()
        before = in_use()
        torch.cuda.caching_allocator_enable(False)
        try:
            t = torch.full((MIB,), 3, dtype=torch.int8, device="cuda")
            self.assertEqual(in_use(), before)
        finally:
            torch.cuda.caching_allocator_enable(True)
        u = torch.full((MIB,), 4, dtype=torch.int8, device="cuda")
        self.assertEqual(in_use(), before + MIB)
        self.assertTrue(bool((t == 3).all()) and bool((u == 4).all()))
        del t, u
        self.assertEqual(in_use(), before)

    def test_enable_after_initialisation(self):
        code = ("import torch; torch.cuda.set_device(0); torch.cuda.init(); torch.cuda.mem_get_info()\n"
                "torch.cuda.set_per_process_memory_fraction(0.5)\n"
                "import vpmm_torch; vpmm_torch.enable(); vpmm_torch.enable(); t = torch.ones(7, device='cuda')\n"
                "fraction = round(torch.cuda.get_per_process_memory_fraction(), 2)\n"
                "with torch.cuda.use_mem_pool(torch.cuda.MemPool()): u = torch.ones(5, device='cuda')\n"
                "graph = torch.cuda.CUDAGraph()\n"
                "with torch.cuda.graph(graph): t += 1\n"
                "graph.replay()\n"
                "print(torch.cuda.get_allocator_backend(), int(t.sum() + u.sum()), fraction)\n")
        done = run_alone(code)
        self.assertEqual(done.stdout.split(), ["vpmm", "19", "0.5"], done.stderr)

    def test_a_pool_made_before_enable(self):
        code = ("import torch; torch.cuda.init(); before = torch.cuda.MemPool()\n"
                "import vpmm_torch; vpmm_torch.enable(); t = torch.ones(7, device='cuda')\n"
                "with torch.cuda.use_mem_pool(before): u = torch.ones(5, device='cuda')\n"
                "print(int(t.sum() + u.sum())); del u; del before\n"
                "print(torch.cuda.get_allocator_backend())\n")
        done = run_alone(code)
        self.assertEqual(done.stdout.split(), ["12", "vpmm"], done.stderr)

    def test_enable_is_refused_beside_history(self):
        code = ("import torch; torch.cuda.init(); torch.cuda.memory._record_memory_history(); import vpmm_torch\n"
                "try: vpmm_torch.enable()\n"
                "except RuntimeError as e: print(e)\n")
        done = run_alone(code)
        self.assertIn("before _record_memory_history", done.stdout + done.stderr)

    def test_enable_is_refused_too_late(self):
        code = ("import torch; torch.ones(1, device='cuda'); import vpmm_torch\n"
                "try: vpmm_torch.enable()\n"
                "except RuntimeError as e: print(e)\n")
        done = run_alone(code)
        self.assertIn("before the first CUDA tensor", done.stdout + done.stderr)


class Shortage(unittest.TestCase):
    def setUp(self):
        gc.collect()
        torch.cuda.empty_cache()

    def test_out_of_memory_is_torch_s_error(self):
        before = torch.cuda.memory_stats()["num_ooms"]
        with self.assertRaisesRegex(torch.OutOfMemoryError, r"Tried to allocate 1048576.00 GiB. GPU 0 has a total"):
            torch.empty(1 << 50, dtype=torch.int8, device="cuda")
        self.assertEqual(torch.cuda.memory_stats()["num_ooms"], before + 1)
        self.assertEqual(torch.ones(3, device="cuda").sum().item(), 3)

    def test_more_than_any_device_has(self):
        for bytes, words in ((1 << 59, "Tried to allocate 536870912.00 GiB. GPU 0"), (1 << 61, "more than 1EB")):
            with self.assertRaisesRegex(torch.OutOfMemoryError, words):
                torch.empty(bytes, dtype=torch.int8, device="cuda")

    def test_a_cache_is_no_reason_to_refuse(self):
        total = torch.cuda.get_device_properties(0).total_memory
        for share in (0.3, 0.6, 0.45):
            t = torch.empty(int(total * share), dtype=torch.int8, device="cuda")
            del t

    def test_the_fraction_bounds_what_is_held(self):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(0.25)
        try:
            self.assertEqual(torch.cuda.get_per_process_memory_fraction(), 0.25)
            with self.assertRaisesRegex(torch.OutOfMemoryError, "out of memory"):
                torch.empty(int(total * 0.3), dtype=torch.int8, device="cuda")
            t = torch.empty(int(total * 0.2), dtype=torch.int8, device="cuda")
            del t
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def test_the_fraction_may_be_a_setting(self):
        code = ("import vpmm_torch, torch; vpmm_torch.enable()\n"
                "print(torch.cuda.get_per_process_memory_fraction())\n"
                "total = torch.cuda.get_device_properties(0).total_memory\n"
                "try: torch.empty(int(total * 0.3), dtype=torch.int8, device='cuda')\n"
                "except torch.OutOfMemoryError: print('refused')\n")
        done = run_alone(code, PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.25")
        self.assertEqual(done.stdout.split(), ["0.25", "refused"], done.stderr)

    def test_the_fraction_is_of_all_pools(self):
        total = torch.cuda.get_device_properties(0).total_memory
        pool = torch.cuda.MemPool()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 80 * MIB) / total)
        try:
            with torch.cuda.use_mem_pool(pool):
                t = torch.empty(40 * MIB, dtype=torch.int8, device="cuda")
            u = torch.empty(30 * MIB, dtype=torch.int8, device="cuda")
            with self.assertRaises(torch.OutOfMemoryError):
                torch.empty(40 * MIB, dtype=torch.int8, device="cuda")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        del t, u, pool

    def test_observers_are_told(self):
        told = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *args: told.append(args))
        with self.assertRaises(torch.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.int8, device="cuda")
        self.assertEqual(len(told), 1)


class Statistics(unittest.TestCase):
    def test_they_count(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, count = in_use(), torch.cuda.memory_stats()["allocation.all.current"]
        t = torch.empty(10 * MIB, dtype=torch.int8, device="cuda")
        self.assertEqual(in_use(), before + 10 * MIB)
        self.assertEqual(torch.cuda.memory_stats()["allocation.all.current"], count + 1)
        self.assertGreaterEqual(torch.cuda.memory_reserved(), in_use())
        del t
        self.assertEqual(in_use(), before)
        self.assertEqual(torch.cuda.max_memory_allocated(), before + 10 * MIB)
        torch.cuda.reset_peak_memory_stats()
        self.assertEqual(torch.cuda.max_memory_allocated(), before)
        self.assertIn("CUDA", torch.cuda.memory_summary())

    def test_blocks_are_of_512_bytes_small_and_large(self):
        def figures(pool):
            stats = torch.cuda.memory_stats()
            return [stats[f"{name}.{pool}.current"] for name in
                    ("allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes")]

        def added(bytes, pool):
            before = figures("all"), figures(pool)
            t = torch.empty(bytes, dtype=torch.int8, device="cuda")
            after = figures("all"), figures(pool)
            del t
            self.assertEqual((figures("all"), figures(pool)), before)
            return [[y - x for x, y in zip(*pair)] for pair in zip(before, after)]

        gc.collect()
        for bytes, block, pool in ((1, 512, "small_pool"), (513, 1024, "small_pool"), (MIB, MIB, "small_pool"),
                                   (MIB + 1, MIB + 512, "large_pool"), (7 * MIB, 7 * MIB, "large_pool")):
            self.assertEqual(added(bytes, pool), [[1, 1, block, block, bytes]] * 2)

    def test_requests_are_rounded_up_as_the_settings_say(self):
        gc.collect()
        before = in_use()
        torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:4")
        try:
            t = torch.empty(84 * MIB, dtype=torch.int8, device="cuda")
        finally:
            torch.cuda.memory._set_allocator_settings("")
        u = torch.empty(84 * MIB, dtype=torch.int8, device="cuda")
        self.assertEqual(in_use(), before + 96 * MIB + 84 * MIB)
        del t, u

    def test_an_empty_cache_is_given_back(self):
        t = torch.empty(512 * MIB, dtype=torch.int8, device="cuda")
        del t
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertLess(torch.cuda.memory_reserved(), in_use() + 64 * MIB)

    def test_the_profiler_is_told(self):
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            t = torch.empty(3 * MIB, dtype=torch.int8, device="cuda")
        self.assertEqual(sum(e.self_device_memory_usage for e in profile.key_averages()), 3 * MIB)
        del t

    def test_who_traces_the_gpu_is_told(self):
        code = ("import torch, vpmm_torch; vpmm_torch.enable()\n"
                "from torch.cuda import _gpu_trace as trace\n"
                "torch._C._activate_gpu_trace()\n"
                "trace.register_callback_for_memory_allocation(lambda address: print('begun'))\n"
                "trace.register_callback_for_memory_deallocation(lambda address: print('ended'))\n"
                "t = torch.empty(1000, device='cuda'); del t\n")
        done = run_alone(code)
        self.assertEqual(done.stdout.split(), ["begun", "ended"], done.stderr)

    def test_history_has_what_record_function_says(self):
        torch.cuda.memory._record_memory_history(global_record_annotations=True)
        with torch.profiler.record_function("of this test"):
            torch.ones(1, device="cuda")
        said = torch.cuda.memory._snapshot()["external_annotations"]
        torch.cuda.memory._record_memory_history(None)
        self.assertTrue(any("of this test" in str(one) for one in said), said)

    def test_metrics_are_served_where_they_are_asked_for(self):
        code = ("import torch, urllib.request, vpmm_torch; vpmm_torch.enable()\n"
                "t = torch.ones(64 << 20, device='cuda')\n"
                "url = 'http://' + __import__('os').environ['VPMM_TORCH_METRICS'] + '/metrics'\n"
                "print(urllib.request.urlopen(url).read().decode())\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        done = run_alone(code, VPMM_TORCH_METRICS=f"127.0.0.1:{port}")
        if "built without the exporter" in done.stderr:
            self.skipTest("vpmm_torch was built without the exporter")
        self.assertRegex(done.stdout, r'vpmm_mapped_bytes\{[^}]*pool="pytorch"[^}]*\} \d{9}', done.stderr)

    def test_history_has_the_program_s_metadata(self):
        torch.cuda.memory._set_memory_metadata("of this test")
        torch.cuda.memory._record_memory_history()
        torch.ones(1, device="cuda")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._set_memory_metadata("")
        self.assertEqual({(e["user_metadata"], e["compile_context"]) for e in trace}, {("of this test", "N/A")})

    def test_a_snapshot_has_what_lives_and_what_happened(self):
        torch.cuda.memory._record_memory_history(max_entries=100)
        began = time.time()
        t = torch.empty(3 * MIB, dtype=torch.int8, device="cuda")
        address = t.data_ptr()
        snapshot = torch.cuda.memory._snapshot()
        lives = [b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == address]
        self.assertEqual([(b["size"], b["requested_size"], b["state"]) for b in lives],
                         [(3 * MIB, 3 * MIB, "active_allocated")])
        self.assertTrue(lives[0]["frames"])
        del t
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        happened = [e for e in snapshot["device_traces"][0]
                    if e["addr"] == address and not e["action"].startswith("segment")]
        self.assertEqual([e["action"] for e in happened], ["alloc", "free_requested", "free_completed"])
        for e in happened:
            self.assertAlmostEqual(e["time_us"] / 1e6, began, delta=60)

    def test_a_snapshot_is_what_is_counted(self):
        kept = [torch.empty(n, dtype=torch.int8, device="cuda") for n in (1000, 100 << 10, 3 * MIB, 40 * MIB)]
        del kept[3:]
        segments = torch.cuda.memory_snapshot()
        self.assertEqual(sum(s["total_size"] for s in segments), torch.cuda.memory_reserved())
        self.assertEqual(sum(s["requested_size"] for s in segments),
                         torch.cuda.memory_stats()["requested_bytes.all.current"])
        self.assertLessEqual(sum(s["allocated_size"] for s in segments), in_use())  # those of 256 bytes lie closer
        for s in segments:
            self.assertEqual(sum(b["size"] for b in s["blocks"]), s["total_size"])
        for t in kept:
            self.assertIn(t.data_ptr(), [b["address"] for s in segments for b in s["blocks"]
                                         if b["state"] == "active_allocated"])

    def test_history_has_what_is_mapped(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.memory._record_memory_history(context="all")
        try:
            t = torch.empty(300 * MIB, dtype=torch.int8, device="cuda")
            address = t.data_ptr()
            del t
            torch.cuda.empty_cache()
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        actions = [e["action"] for e in trace]
        maps = [e for e in trace if e["action"] == "segment_map"]
        self.assertTrue(any(e["addr"] <= address < e["addr"] + e["size"] for e in maps))
        self.assertLess(actions.index("segment_map"), actions.index("alloc"))
        self.assertEqual(actions[-1], "segment_unmap")
        self.assertIn("empty_cache", str(trace[-1]["frames"]))


class Streams(unittest.TestCase):
    def test_memory_is_for_its_stream_first(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            t = torch.ones(5 * MIB, dtype=torch.int8, device="cuda")
            address = t.data_ptr()
            del t
            self.assertEqual(torch.empty(5 * MIB, dtype=torch.int8, device="cuda").data_ptr(), address)

    def test_record_stream(self):
        """As PyTorch's own: what another stream was said to use is nobody's before that stream is done."""
        stream = torch.cuda.Stream()
        address, result = freed_while_used(stream)
        other = torch.full((4 * MIB,), 9, dtype=torch.int8, device="cuda")
        self.assertNotEqual(other.data_ptr(), address)
        stream.synchronize()
        self.assertTrue(bool((result == 7).all()))

    def test_no_stream_waits_for_another(self):
        """What one stream has freed and still uses is not worth a wait to another."""
        busy, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(busy):
            t = torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
            torch.cuda._sleep(5 * CYCLES)
            t.fill_(1)
            del t
        with torch.cuda.stream(other):
            t = torch.full((64 * MIB,), 2, dtype=torch.int8, device="cuda")
        other.synchronize()
        self.assertFalse(busy.query())
        busy.synchronize()
        self.assertTrue(bool((t == 2).all()))

    def test_a_free_goes_behind_the_stream_of_the_allocation(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            t = torch.full((6 * MIB,), 1, dtype=torch.int8, device="cuda")
            kept = t.clone()
        del t  # on the default stream, while `stream` has not filled it yet
        other = torch.full((6 * MIB,), 2, dtype=torch.int8, device="cuda")
        stream.synchronize()
        self.assertTrue(bool((kept == 1).all()) and bool((other == 2).all()))

    def test_what_a_stream_has_freed_last_serves_others(self):
        """PyTorch has 32 streams for all who want one: what lies in a cache of each is in the others' reach."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(32):
            with torch.cuda.stream(torch.cuda.Stream()):
                tensors = [torch.empty(2 * MIB, dtype=torch.int8, device="cuda") for _ in range(4)]
                del tensors
            torch.cuda.synchronize()
        self.assertLess(torch.cuda.memory_reserved() - before, 64 * MIB)

    def test_a_stream_of_the_program_s_own_may_be_destroyed(self):
        """Nobody touches its handle any more, whatever lies in its cache."""
        ended = run_alone("""
import ctypes, torch, vpmm_torch
vpmm_torch.enable()
driver = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")
for turn in range(16):
    handle = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        tensors = [torch.empty(2 << 20, dtype=torch.int8, device="cuda") for _ in range(3)]
        del tensors
    torch.cuda.synchronize()
    assert driver.cuStreamDestroy_v2(handle) == 0
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.empty((8 + turn) << 20, dtype=torch.int8, device="cuda")
torch.cuda.empty_cache()
print("done")
""")
        self.assertIn("done", ended.stdout, ended.stderr)


class Graphs(unittest.TestCase):
    def capture(self, work, **options):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, **options):
            result = work()
        return graph, result

    def test_a_capture_replays(self):
        x = torch.ones(1 << 20, device="cuda")
        graph, y = self.capture(lambda: (x * 2 + 1) * 3)
        for n in (1, 5):
            x.fill_(n)
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(bool((y == (n * 2 + 1) * 3).all()))

    def test_its_memory_is_nobody_else_s(self):
        x = torch.ones(1 << 20, device="cuda")
        graph, y = self.capture(lambda: (x + 1) + 1)
        others = [torch.full((1 << 20,), float(i), device="cuda") for i in range(64)]
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(bool((y == 3).all()))
        for i, t in enumerate(others):
            self.assertTrue(bool((t == i).all()))

    def test_memory_from_outside_may_be_freed_inside(self):
        held = [torch.ones(3 * MIB, dtype=torch.int8, device="cuda")]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            held.append(torch.ones(3 * MIB, dtype=torch.int8, device="cuda"))
        torch.cuda.synchronize()
        before = in_use()

        def work():
            held.clear()
            return torch.zeros(MIB, device="cuda") + 1

        graph, y = self.capture(work, stream=stream)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(bool((y == 1).all()))
        self.assertLess(in_use(), before + 8 * MIB)
        del graph, y

    def test_a_forked_stream_may_be_said_in_a_capture(self):
        """record_stream of memory from outside, and of the capture's own, while both streams capture."""
        x, stream = torch.ones(1 << 20, device="cuda"), torch.cuda.Stream()
        before, held = in_use(), [torch.full((1 << 20,), 2.0, device="cuda")]

        def work():
            inner = x + 1
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = inner + 2
                held[0].record_stream(stream)
                inner.record_stream(stream)
            held.clear()
            torch.cuda.current_stream().wait_stream(stream)
            return result

        graph, y = self.capture(work)
        for n in (1, 4):
            x.fill_(n)
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(bool((y == n + 3).all()))
        self.assertLess(in_use(), before + (4 << 20) + 4096)  # the first capture's seeds are there, too

    def test_what_has_joined_is_used_again_where_that_is_asked_for(self):
        """And what has not is not. The work that used it is not changed by what comes after, in each replay."""

        def addresses(reuse):
            graph, stream, x = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.ones(1 << 18, device="cuda")
            torch.cuda.memory._set_allocator_settings(f"graph_capture_record_stream_reuse:{reuse}")
            try:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    used = x + 1
                    address = used.data_ptr()
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        result = used + 2
                        used.record_stream(stream)
                    del used
                    before = torch.full_like(x, 50)
                    torch.cuda.current_stream().wait_stream(stream)
                    x.add_(1)
                    after = torch.full_like(x, 60)
            finally:
                torch.cuda.memory._set_allocator_settings("graph_capture_record_stream_reuse:False")
            for n in (5, 9):
                x.fill_(n)
                graph.replay()
                torch.cuda.synchronize()
                self.assertTrue(bool((result == n + 3).all()))
            return before.data_ptr() == address, after.data_ptr() == address

        self.assertEqual(addresses(True), (False, True))
        self.assertEqual(addresses(False), (False, False))

    def test_three_share_a_pool(self):
        pool = torch.cuda.graph_pool_handle()
        x = torch.ones(1 << 20, device="cuda")
        a, y = self.capture(lambda: x + 1, pool=pool)
        b, z = self.capture(lambda: y * 2, pool=pool)
        c, w = self.capture(lambda: z - 1, pool=pool)
        for graph in (a, b, c):
            graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(bool((w == 3).all()))

    def test_its_memory_comes_back(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        x = torch.ones(1, device="cuda")
        graph, y = self.capture(lambda: x.expand(64 * MIB) + 1)
        self.assertGreaterEqual(torch.cuda.memory_reserved(), before + 256 * MIB)
        del graph, y
        gc.collect()
        torch.cuda.empty_cache()
        self.assertLess(torch.cuda.memory_reserved(), before + 64 * MIB)

    def test_a_capture_that_fails_leaves_all_well(self):
        """In a process of its own: PyTorch's random numbers are not as they were after it."""
        code = ("import vpmm_torch, torch; vpmm_torch.enable()\n"
                "try:\n"
                "    with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
                "        torch.ones(1 << 20, device='cuda').sum().item()  # waits, which no capture allows\n"
                "except Exception: print('refused')\n"
                "torch.cuda.synchronize(); print(int(torch.ones(3, device='cuda').sum().item()))\n")
        done = run_alone(code)
        self.assertEqual(done.stdout.split(), ["refused", "3"], done.stderr)

    def test_others_free_after_a_capture_that_failed(self):
        """PyTorch does not say that it has ended. In a process of its own, as the one before."""
        code = ("import threading, torch, vpmm_torch; vpmm_torch.enable()\n"
                "held = [torch.ones(64 << 20, dtype=torch.int8, device='cuda') for _ in range(8)]\n"
                "try:\n"
                "    with torch.cuda.graph(torch.cuda.CUDAGraph()): torch.cuda.synchronize()\n"
                "except Exception: print('refused')\n"
                "torch.cuda.synchronize(); x = torch.ones(1, device='cuda')\n"
                "def drop():\n"
                "    held.clear(); torch.cuda.synchronize(); torch.cuda.empty_cache()\n"
                "    print(torch.cuda.memory_reserved() < 256 << 20)\n"
                "other = threading.Thread(target=drop); other.start(); other.join()\n")
        done = run_alone(code)
        self.assertEqual(done.stdout.split(), ["refused", "True"], done.stderr)

    def test_a_module_is_trained_by_graph(self):
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)).cuda()
        x = torch.randn(64, 256, device="cuda")
        graphed = torch.cuda.make_graphed_callables(model, (x,))
        for _ in range(3):
            graphed(x).sum().backward()
        torch.cuda.synchronize()
        self.assertTrue(all(torch.isfinite(p.grad).all() for p in model.parameters()))


class Compiled(unittest.TestCase):
    """torch.compile(mode="reduce-overhead"), whose graph trees go back to checkpoints of their pool."""

    def setUp(self):
        torch._dynamo.reset()

    def test_two_children_of_a_graph(self):
        """The second is recorded after a checkpoint has been gone back to; then each is replayed."""

        @torch.compile(mode="reduce-overhead")
        def first(x):
            return torch.relu(x @ x) + 1

        @torch.compile(mode="reduce-overhead")
        def left(y):
            return (y * 2).sum(0)

        @torch.compile(mode="reduce-overhead")
        def right(y):
            return (y - 3).abs().max(1).values

        with torch.no_grad():
            for i in range(12):
                torch.compiler.cudagraph_mark_step_begin()
                x = torch.full((512, 512), 0.01 * (i + 1), device="cuda")
                y = first(x)
                z = (left if i % 4 < 2 else right)(y)
                expected = torch.relu(x @ x) + 1
                expected = (expected * 2).sum(0) if i % 4 < 2 else (expected - 3).abs().max(1).values
                torch.testing.assert_close(z, expected, rtol=1e-3, atol=1e-3)
                del y, z

    def test_training(self):
        """Forward and backward graphs, with outputs as those of the same model without graphs."""

        def trained(compiled):
            torch.manual_seed(1)
            model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)], torch.nn.GELU()).cuda()
            step = torch.compile(model, mode="reduce-overhead") if compiled else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for i in range(8):
                x = torch.randn(128 if i % 3 else 64, 512, device="cuda", generator=draw)
                loss = step(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return [p.detach().clone() for p in model.parameters()]

        results = []
        for compiled in (False, True):
            draw = torch.Generator("cuda").manual_seed(7)
            results.append(trained(compiled))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)

    def tearDown(self):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertEqual([s for s in torch.cuda.memory_snapshot()
                          if s["segment_pool_id"] != (0, 0) and s["active_size"]], [])


class Pools(unittest.TestCase):
    def test_a_pool_keeps_what_is_its_own(self):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            t = torch.full((4 * MIB,), 5, dtype=torch.int8, device="cuda")
        u = torch.full((4 * MIB,), 6, dtype=torch.int8, device="cuda")
        segments = pool.snapshot()
        self.assertEqual([s["address"] for s in segments], [t.data_ptr()])
        self.assertTrue(bool((t == 5).all()) and bool((u == 6).all()))
        del t, u
        free = pool.snapshot()  # it keeps it
        self.assertEqual([(s["address"], s["total_size"], s["active_size"]) for s in free],
                         [(segments[0]["address"], 4 * MIB, 0)])
        del pool

    def test_memory_that_further_streams_used_is_used_again(self):
        """And not before they are done."""
        pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
        with torch.cuda.use_mem_pool(pool):
            address, result = freed_while_used(stream)
            other = torch.full((4 * MIB,), 9, dtype=torch.int8, device="cuda")
            self.assertNotEqual(other.data_ptr(), address)
            stream.synchronize()
            self.assertTrue(bool((result == 7).all()))
            again = torch.empty(4 * MIB, dtype=torch.int8, device="cuda")
            self.assertEqual(again.data_ptr(), address)
        del other, again, result, pool

    def test_others_frees_are_made_in_the_end(self):
        """Those of another thread while this one captures, or uses a pool."""
        gc.collect()
        before, held = in_use(), [torch.ones(32 * MIB, dtype=torch.int8, device="cuda")]
        address = held[0].data_ptr()
        torch.cuda.synchronize()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        self.assertEqual(in_use(), before)
        t = torch.empty(32 * MIB, dtype=torch.int8, device="cuda")
        self.assertEqual(t.data_ptr(), address)
        del t, pool


@unittest.skipIf(torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1), "needs two peers")
class Peers(unittest.TestCase):
    def test_copies_between_devices(self):
        """Contiguous ones are the driver's, others are by a kernel that reads the other device's memory."""
        for source, target in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
            there = torch.arange(4 * MIB, device=source).reshape(2048, -1)
            copies = (there.to(target), there.t().to(target).t(), (there + 1).to(target) - 1)
            for copy in copies:
                self.assertTrue(torch.equal(copy.cpu(), there.cpu()))
            later = torch.full((3 * MIB,), 4, device=source)[::2]  # of memory that is made after access was given
            self.assertTrue(bool((later.to(target) == 4).all()))

    def test_memory_of_a_pool_is_reached(self):
        pool = torch.cuda.MemPool()
        torch.ones(8, device="cuda:0").to("cuda:1")
        with torch.cuda.use_mem_pool(pool):
            t = torch.full((3 * MIB,), 4, device="cuda:0")[::2]
        self.assertTrue(bool((t.to("cuda:1") == 4).all()))
        del t


class Parking(unittest.TestCase):
    def setUp(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.pool = torch.cuda.MemPool()

    def fill_pool(self):
        """Tensors of a page and more, and of less, and what is held without them."""
        held = torch.cuda.memory_reserved()
        with torch.cuda.use_mem_pool(self.pool):
            tensors = [torch.full((n,), i, dtype=torch.int32, device="cuda") for i, n in enumerate((9 * MIB, 1000, 3))]
        return tensors, held

    def test_what_is_kept_comes_back(self):
        tensors, held = self.fill_pool()
        addresses = [t.data_ptr() for t in tensors]
        free = torch.cuda.mem_get_info()[0]
        vpmm_torch.park(self.pool, keep=True)
        self.assertEqual(torch.cuda.memory_reserved(), held)
        self.assertGreaterEqual(torch.cuda.mem_get_info()[0], free + 36 * MIB)
        vpmm_torch.wake(self.pool)
        self.assertEqual([t.data_ptr() for t in tensors], addresses)
        for i, t in enumerate(tensors):
            self.assertTrue(bool((t == i).all()))

    def test_nothing_is_made_in_a_parked_pool(self):
        tensors, _ = self.fill_pool()
        vpmm_torch.park(self.pool)
        with self.assertRaisesRegex(RuntimeError, "is parked"), torch.cuda.use_mem_pool(self.pool):
            torch.empty(1, device="cuda")
        del tensors
        vpmm_torch.wake(self.pool)
        self.fill_pool()

    def test_a_graph_replays_after_it(self):
        """Its constants are kept; the rest each replay makes anew."""
        x, graph = torch.ones(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
        handle = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=handle):
            y = (x * 2 + 1) * 3
        for keep in (True, False):
            for n in (1, 5):
                vpmm_torch.park(handle, keep)
                vpmm_torch.wake(handle)
                x.fill_(n)
                graph.replay()
                torch.cuda.synchronize()
                self.assertTrue(bool((y == (n * 2 + 1) * 3).all()))

    def test_waking_waits_for_room(self):
        tensors, _ = self.fill_pool()
        vpmm_torch.park(self.pool, keep=True)
        others = torch.empty(torch.cuda.mem_get_info()[0] - 8 * MIB, dtype=torch.int8, device="cuda")
        with self.assertRaises(torch.OutOfMemoryError):
            vpmm_torch.wake(self.pool)
        del others  # free, and not yet the device's
        vpmm_torch.wake(self.pool)
        self.assertTrue(bool((tensors[0] == 0).all()))

    def test_others_are_not_parked(self):
        with self.assertRaisesRegex(RuntimeError, "there is no memory pool"):
            vpmm_torch.park((0, 0))
        with torch.cuda.use_mem_pool(self.pool), self.assertRaisesRegex(RuntimeError, "use_mem_pool"):
            vpmm_torch.park(self.pool, keep=True)



def other_process(inbox, outbox):
    """Adds 1 to each tensor that comes, and says which back end it has; for a number it makes a tensor of its own."""
    kept = []
    while (thing := inbox.get()) is not None:
        if isinstance(thing, int):
            kept.append(torch.full((2 * MIB,), thing, dtype=torch.int32, device="cuda"))
            outbox.put(kept[-1])
        else:
            thing += 1
            torch.cuda.synchronize()
            del thing
            outbox.put(torch.cuda.get_allocator_backend())


class Sharing(unittest.TestCase):
    back_end = "vpmm"

    def setUp(self):
        context = torch.multiprocessing.get_context("spawn")
        self.there, self.here = context.Queue(), context.Queue()
        self.other = context.Process(target=other_process, args=(self.there, self.here))
        if self.back_end == "native":
            os.environ["VPMM_CHECK_AS_NATIVE"] = "1"
        try:
            self.other.start()
        finally:
            os.environ.pop("VPMM_CHECK_AS_NATIVE", None)

    def tearDown(self):
        self.there.put(None)
        self.other.join(60)
        self.assertEqual(self.other.exitcode, 0)

    def test_what_the_other_process_made(self):
        for n in (5, 6):
            self.there.put(n)
            t = self.here.get(timeout=60)
            self.assertTrue(bool((t == n).all()))
            t.fill_(n + 1)
            u = t.clone()
            torch.cuda.synchronize()
            del t
            self.assertTrue(bool((u == n + 1).all()))


class SharingOfOurs(Sharing):
    def test_the_other_process_writes_to_ours(self):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            in_pool = torch.zeros(5 * MIB, dtype=torch.int32, device="cuda")
        large = torch.zeros(300 * MIB, dtype=torch.int32, device="cuda")
        for t in (torch.zeros(1000, dtype=torch.int32, device="cuda"), large, large[7 * MIB:], in_pool):
            for _ in range(2):
                before = t.clone()
                torch.cuda.synchronize()
                self.there.put(t)
                self.assertEqual(self.here.get(timeout=60), self.back_end)
                self.assertTrue(bool((t == before + 1).all()))

    def test_its_memory_comes_back(self):
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        t = torch.zeros(64 * MIB, dtype=torch.int8, device="cuda")
        torch.cuda.synchronize()
        self.there.put(t)
        self.assertEqual(self.here.get(timeout=60), self.back_end)
        del t
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_reserved(), held)


class SharingOfPyTorchs(Sharing):
    """Of a process without vpmm: its memory is opened as PyTorch's own allocator does."""
    back_end = "native"


class Settings(unittest.TestCase):
    def test_a_back_end_that_they_name_is_not_asked_for(self):
        for backend in ("native", "cudaMallocAsync"):
            done = run_alone("import torch; torch.ones(1, device='cuda'); print(torch.cuda.get_allocator_backend())",
                             VPMM_TORCH="1", PYTORCH_CUDA_ALLOC_CONF=f"backend:{backend}")
            self.assertEqual(done.stdout.split(), ["vpmm"], done.stderr)

    def test_a_wrong_switch_is_an_error(self):
        done = run_alone("import torch", VPMM_TORCH="perhaps")
        self.assertIn('VPMM_TORCH is "perhaps"', done.stderr)


class PoolsOverAnotherAllocator(unittest.TestCase):
    def setUp(self):
        gc.collect()
        self.before, self.held = in_use(), torch.cuda.memory_reserved()
        self.allocator = vpmm_torch.pluggable()  # another than the one that is enabled
        self.pool = torch.cuda.MemPool(self.allocator.allocator())

    def tearDown(self):
        del self.pool
        gc.collect()
        self.assertEqual(in_use(), self.before)
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved(), self.held)

    def test_its_memory_is_divided_and_used_again(self):
        with torch.cuda.use_mem_pool(self.pool):
            small = [torch.full((1000,), n, device="cuda") for n in range(20)]
            large = torch.full((32 * MIB,), 3, dtype=torch.int8, device="cuda")
        outside = torch.full((32 * MIB,), 4, dtype=torch.int8, device="cuda")
        segments = self.pool.snapshot()
        self.assertEqual(len(segments), 2)
        self.assertTrue(all(bool((t == n).all()) for n, t in enumerate(small)))
        self.assertTrue(bool((large == 3).all()) and bool((outside == 4).all()))
        self.assertEqual(in_use(), self.before + 20 * 8192 + 64 * MIB)
        address = large.data_ptr()
        del large
        with torch.cuda.use_mem_pool(self.pool):
            again = torch.empty(32 * MIB, dtype=torch.int8, device="cuda")
        self.assertEqual(again.data_ptr(), address)
        del again, small, outside, segments

    def test_record_stream(self):
        stream = torch.cuda.Stream()
        with torch.cuda.use_mem_pool(self.pool):
            address, result = freed_while_used(stream)
            other = torch.full((4 * MIB,), 9, dtype=torch.int8, device="cuda")
            self.assertNotEqual(other.data_ptr(), address)
        stream.synchronize()
        self.assertTrue(bool((result == 7).all()))
        del other, result

    def test_what_was_recorded_is_used_again(self):
        stream, held = torch.cuda.Stream(), torch.cuda.memory_reserved()
        for _ in range(20):
            with torch.cuda.use_mem_pool(self.pool):
                t = torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                t.fill_(1)
            t.record_stream(stream)
            del t
            torch.cuda.synchronize()
        self.assertLessEqual(torch.cuda.memory_reserved(), held + 2 * 64 * MIB)

    def test_what_was_recorded_is_waited_for_before_a_request_fails(self):
        stream = torch.cuda.Stream()
        size = torch.cuda.mem_get_info()[0] // 5 * 3
        with torch.cuda.use_mem_pool(self.pool):
            t = torch.empty(size, dtype=torch.int8, device="cuda")
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1 << 28)  # some 150 ms
            t.record_stream(stream)
            del t
            t = torch.empty(size, dtype=torch.int8, device="cuda")  # there is no room for two
        del t

    def test_several_threads(self):
        def work(n):
            with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(self.pool):
                for i in range(100):
                    t = torch.full((1 + (i * 7919 + n) % 300000,), n, device="cuda")
                    if i % 10 == 0 and not bool((t == n).all()):
                        failed.append(n)
            torch.cuda.synchronize()

        failed = []
        thread = threading.Thread(target=work, args=(1,))
        thread.start()
        kept = [torch.full((3 * MIB,), n % 100, dtype=torch.int8, device="cuda") for n in range(50)]
        thread.join()
        self.assertEqual(failed, [])
        self.assertTrue(all(bool((t == n % 100).all()) for n, t in enumerate(kept)))

    def test_a_free_block_helps_out(self):
        """In a shortage, where the pool is for that; it does not grow."""
        pool = torch.cuda.MemPool(self.allocator.allocator(), use_on_oom=True)
        with torch.cuda.use_mem_pool(pool):
            t = torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
        address = t.data_ptr()
        del t
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of the main pool: it has no free block either
        torch.cuda.set_per_process_memory_fraction(1e-7)
        try:
            t = torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
            self.assertEqual(t.data_ptr(), address)
            with self.assertRaises(torch.OutOfMemoryError):
                torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        with torch.cuda.use_mem_pool(pool):
            u = torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
        self.assertNotEqual(u.data_ptr(), address)
        del t, u, pool

    def test_more_than_there_is(self):
        with torch.cuda.use_mem_pool(self.pool), self.assertRaises(torch.OutOfMemoryError):
            torch.empty(1 << 44, dtype=torch.int8, device="cuda")

    def test_a_library_registers_what_a_pool_grows_by(self):
        """NCCL follows the pool's segments, and finds each when it is to forget them."""
        if not torch.distributed.is_nccl_available():
            self.skipTest("PyTorch was built without NCCL")
        code = ("import torch, torch.distributed as dist, vpmm_torch; vpmm_torch.enable()\n"
                "dist.init_process_group('nccl', rank=0, world_size=1, store=dist.HashStore(),\n"
                "                        device_id=torch.device('cuda', 0))\n"
                "backend = dist.group.WORLD._get_backend(torch.device('cuda', 0))\n"
                "allocator = vpmm_torch.pluggable(); pool = torch.cuda.MemPool(allocator.allocator())\n"
                "with torch.cuda.use_mem_pool(pool): t = torch.ones(1 << 20, device='cuda')\n"
                "dist.all_reduce(t)\n"
                "backend.register_mem_pool(pool)\n"
                "with torch.cuda.use_mem_pool(pool): more = torch.ones(1 << 26, device='cuda')\n"
                "dist.all_reduce(more)\n"
                "backend.deregister_mem_pool(pool)\n"
                "print(int(t[0] + more[0])); del t, more, pool; dist.destroy_process_group()\n")
        done = run_alone(code)
        self.assertEqual(done.stdout.split()[-1:], ["2"], done.stderr)

    def test_beside_pytorch_s_own_allocator(self):
        code = ("import torch, vpmm_torch\n"
                "allocator = vpmm_torch.pluggable()\n"
                "pool = torch.cuda.MemPool(allocator.allocator())\n"
                "with torch.cuda.use_mem_pool(pool): t = torch.full((1 << 22,), 3.0, device='cuda')\n"
                "u = torch.full((1 << 22,), 4.0, device='cuda')\n"
                "assert [s['address'] for s in pool.snapshot()] == [t.data_ptr()]\n"
                "assert bool((t == 3).all()) and bool((u == 4).all())\n"
                "del t, u, pool\n")
        done = run_alone(code)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    unittest.main()
