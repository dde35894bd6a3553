//! Timing, and counting of allocated bytes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Rounds of each figure; the best counts.
pub const ROUNDS: usize = 5;

/// Nanoseconds for one operation: the best of several rounds of `operations` calls on each of
/// `threads` threads, as wall time over all calls. `work(thread, n)` makes `n` calls.
pub fn best_nanos(threads: usize, operations: usize, work: impl Fn(usize, usize) + Sync) -> f64 {
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        best = best.min(one_round(threads, operations, &work));
    }
    best.as_secs_f64() * 1e9 / (operations * threads) as f64
}

fn one_round(threads: usize, operations: usize, work: &(impl Fn(usize, usize) + Sync)) -> Duration {
    let ready = Barrier::new(threads);
    // Each thread reads the clock itself. On a busy machine, another thread may see the start only
    // after the work is done.
    let timed = |thread: usize| {
        ready.wait();
        let start = Instant::now();
        work(thread, operations);
        (start, Instant::now())
    };
    std::thread::scope(|scope| {
        let timed = &timed;
        let spawned: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || timed(thread))).collect();
        let times = spawned.into_iter().map(|thread| thread.join().expect("no panic"));
        let (start, end) = times
            .reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)))
            .expect("at least one thread");
        end - start
    })
}

/// Random indices below `len`, the same in every run.
pub struct Walk {
    state: u64,
    len: u64,
}

impl Walk {
    pub fn new(seed: usize, len: usize) -> Self {
        Self { state: 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed as u64 + 1), len: len as u64 }
    }

    pub fn next_place(&mut self) -> usize {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (((self.state >> 33) * self.len) >> 31) as usize
    }
}

pub fn keys(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("key-{n:07}")).collect()
}

/// The system's allocator, with a count of the allocated bytes.
pub struct CountingAllocator;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static COUNTING: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Bytes allocated minus bytes freed while counting was on.
pub fn allocated() -> usize {
    ALLOCATED.load(Ordering::Relaxed)
}

/// Switches counting, which is off during timings because it costs some time.
pub fn count_allocations(on: bool) {
    COUNTING.store(on, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Ordering::Relaxed) {
            ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        }
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if COUNTING.load(Ordering::Relaxed) {
            ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        }
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_covers_the_work_of_every_thread() {
        let work = |thread: usize, _: usize| {
            std::thread::sleep(Duration::from_millis(5 + 20 * thread as u64));
        };
        for _ in 0..20 {
            assert!(one_round(1, 1, &work) >= Duration::from_millis(5));
        }
        assert!(one_round(2, 1, &work) >= Duration::from_millis(25));
    }
}
