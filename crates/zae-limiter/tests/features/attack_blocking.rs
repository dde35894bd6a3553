//! Attacks on `blocking`: at the end of a thread, where other thread-local values are already gone.

use std::cell::RefCell;
use std::sync::Arc;

use zae_limiter::store::Store;
use zae_limiter::testing::SystemClock;
use zae_limiter::{RateLimiter, blocking};

use crate::world::{Kind, World, without_refill};

/// Works when its thread ends.
struct AtEnd(Option<Box<dyn FnOnce()>>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        if let Some(work) = self.0.take() {
            work();
        }
    }
}

thread_local! {
    static AT_END: RefCell<AtEnd> = const { RefCell::new(AtEnd(None)) };
}

fn limiter(world: &World) -> RateLimiter {
    let store: Arc<dyn Store> = Arc::clone(&world.store) as Arc<dyn Store>;
    let builder = RateLimiter::builder(store).clock(Arc::new(SystemClock));
    blocking::open(builder.default_limits([without_refill("tpm", 100)])).unwrap()
}

fn take(limiter: &RateLimiter, tokens: u64) -> zae_limiter::Lease {
    blocking::wait(limiter.acquire("key", "gpt-4").take("tpm", tokens)).unwrap()
}

fn left(limiter: &RateLimiter) -> i64 {
    let statuses = blocking::wait(limiter.available("key", "gpt-4", &[("tpm", 0)])).unwrap();
    statuses[0].available.whole_tokens()
}

/// Runs a thread that takes 10 tokens and does this with the lease at its very end.
fn at_the_end_of_a_thread(limiter: &RateLimiter, work: fn(zae_limiter::Lease)) {
    let limiter = limiter.clone();
    let thread = std::thread::spawn(move || {
        // Registered before those of the runtime, so destroyed after them.
        AT_END.with_borrow(|_| ());
        let lease = take(&limiter, 10);
        AT_END.with_borrow_mut(|at_end| at_end.0 = Some(Box::new(move || work(lease))));
    });
    thread.join().unwrap();
}

/// "`drop` never blocks, on any thread. The refund needs no runtime of yours": also if the lease is thread-local.
#[test]
fn a_thread_local_lease_is_refunded() {
    for kind in Kind::ALL {
        let world = World::new(*kind);
        let limiter = limiter(&world);
        at_the_end_of_a_thread(&limiter, drop);
        assert!((0..100_000).any(|_| {
            std::thread::yield_now();
            left(&limiter) == 100
        }));
    }
}

/// "If it happens anyway, the call still ends."
#[test]
fn a_wait_at_the_end_of_a_thread_ends() {
    for kind in Kind::ALL {
        let world = World::new(*kind);
        let limiter = limiter(&world);
        at_the_end_of_a_thread(&limiter, |lease| blocking::wait(lease.commit()).unwrap());
        assert_eq!(left(&limiter), 90);
        at_the_end_of_a_thread(&limiter, |lease| blocking::wait(lease.rollback()).unwrap());
        assert_eq!(left(&limiter), 90);
    }
}

/// A wait within a wait.
#[test]
fn a_wait_within_a_wait_ends() {
    for kind in Kind::ALL {
        let world = World::new(*kind);
        let limiter = limiter(&world);
        blocking::wait(async {
            let lease = take(&limiter, 10);
            blocking::wait(async { blocking::wait(lease.commit()).unwrap() });
            limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap().commit().await.unwrap();
        });
        assert_eq!(left(&limiter), 80);
    }
}
