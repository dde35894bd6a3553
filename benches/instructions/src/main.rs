//! Runs one warm path a number of times, for callgrind to count its instructions: see `benches/instructions/count`.
//!
//!     zae-limiter-instructions                 the names of the paths
//!     zae-limiter-instructions PATH COUNT      prepares the path, and calls it COUNT times
//!
//! Nothing here depends on real time or on other threads, so two runs execute almost the same instructions.

mod memory;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// A path: prepares everything, then makes the given number of calls.
type Run = fn(usize);

/// Every path with its name. Other stores add theirs here.
const PATHS: &[(&str, Run)] = &[
    ("memory-generic", memory::generic),
    ("memory-prepared", memory::prepared),
    ("memory-try-acquire", memory::try_acquire),
    ("memory-generic-many-keys", memory::generic_many_keys),
    ("memory-prepared-many-keys", memory::prepared_many_keys),
    ("memory-generic-refused", memory::generic_refused),
    ("memory-prepared-refused", memory::prepared_refused),
];

fn main() {
    let mut words = std::env::args().skip(1);
    let Some(name) = words.next() else {
        return PATHS.iter().for_each(|(name, _)| println!("{name}"));
    };
    let count = words.next().and_then(|word| word.parse().ok()).expect("PATH COUNT");
    let (_, run) = PATHS.iter().find(|(path, _)| *path == name).expect("a path of the list");
    run(count);
}

/// Counted: callgrind sees only what runs in here.
#[inline(never)]
fn measured(work: impl FnOnce()) {
    work();
    // So that the call is no tail call, which would leave the function early.
    std::hint::black_box(());
}

/// Polls the work until it is done. What is measured here is done at once.
fn block_on<T>(work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    loop {
        if let Poll::Ready(done) = work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return done;
        }
        std::thread::yield_now();
    }
}
