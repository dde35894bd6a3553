//! Decisions in memory, compared with other limiters.

use std::hint::black_box;
use std::sync::Arc;

use zae_limiter_core::{
    Ask, Bucket, Limit, LimitSet, MemoryStore, RateLimiter, Take, Timestamp, Verdict, amount,
    decide,
};

use crate::measure::{Walk, best_nanos, keys};
use crate::peers::{Baseline, Governor, Limitador};
use crate::report::{Report, grouped};

const OPERATIONS: usize = 400_000;

pub fn limits() -> [Limit; 2] {
    [Limit::per_second("rpm", 1_000_000_000), Limit::per_second("tpm", 100_000_000_000)]
}

pub fn run(report: &mut Report) {
    report.title("In memory: one decision on two limits, nanoseconds (ratio to governor)");
    report.line(
        "| keys | threads | baseline, ns | governor, ns | limitador, ns | generic, ns | prepared, ns | \
         without a future, ns |",
    );
    report.line("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for count in [1, 100_000] {
        let keys = keys(count);
        for threads in [1, 2] {
            row(&keys, threads, report);
        }
    }
    let decision = decision();
    report.line("");
    report.line(format!("The decision alone, `decide` on a bucket at hand: {decision:.1} ns."));
}

/// Nanoseconds of the pure decision. The calls are a millisecond apart, so that each one refills.
pub fn decision() -> f64 {
    let limits = Arc::new(LimitSet::new(limits()).expect("valid"));
    best_nanos(1, 4_000_000, |_, operations| {
        let mut bucket = Bucket::full(Arc::clone(&limits), Timestamp::from_millis(0));
        let takes = [
            Take { cell: 0, amount: amount(1).expect("small") },
            Take { cell: 1, amount: amount(10).expect("small") },
        ];
        for now in 0..operations as i64 {
            let asks = &mut [Ask { bucket: black_box(&mut bucket), takes: black_box(&takes) }];
            assert_eq!(decide(asks, black_box(Timestamp::from_millis(now))), Verdict::Admitted);
        }
    })
}

fn row(keys: &[String], threads: usize, report: &mut Report) {
    let baseline = Baseline::new(keys.len());
    let baseline = best_nanos(threads, OPERATIONS, |thread, operations| {
        let mut walk = Walk::new(thread, keys.len());
        (0..operations).for_each(|_| baseline.decide(walk.next_place()));
    });
    let governor = Governor::new();
    let governor = best_nanos(threads, OPERATIONS, |thread, operations| {
        let mut walk = Walk::new(thread, keys.len());
        (0..operations).for_each(|_| governor.decide(&keys[walk.next_place()]));
    });
    let limitador = Limitador::new(keys);
    let limitador = best_nanos(threads, OPERATIONS / 4, |thread, operations| {
        let mut walk = Walk::new(thread, keys.len());
        (0..operations).for_each(|_| limitador.decide(walk.next_place()));
    });
    let limiter = limiter();
    let generic = best_nanos(threads, OPERATIONS, |thread, operations| {
        let mut walk = Walk::new(thread, keys.len());
        block_on(async {
            for _ in 0..operations {
                acquire_and_commit(&limiter, &keys[walk.next_place()]).await;
            }
        });
    });
    let prepared = limiter.prepare("gpt-4", ["rpm", "tpm"]).expect("valid names");
    // Fills the cache: a call that is not awaited could not.
    block_on(async {
        for key in keys {
            acquire_and_commit(&limiter, key).await;
        }
    });
    let awaited = best_nanos(threads, OPERATIONS, |thread, operations| {
        let mut walk = Walk::new(thread, keys.len());
        block_on(async {
            for _ in 0..operations {
                let lease = prepared.acquire(&keys[walk.next_place()], [1, 10]).await;
                lease.expect("within the limits").commit().await.expect("nothing to write");
            }
        });
    });
    let at_once = best_nanos(threads, OPERATIONS, |thread, operations| {
        let mut walk = Walk::new(thread, keys.len());
        for _ in 0..operations {
            let lease = prepared.try_acquire(&keys[walk.next_place()], [1, 10]);
            drop(lease.expect("within the limits, and cached").commit());
        }
    });
    let shown = |nanos: f64| {
        let text = if nanos < 10.0 { format!("{nanos:.1}") } else { grouped(nanos) };
        format!("{text} ({:.2})", nanos / governor)
    };
    report.line(format!(
        "| {} | {threads} | {} | {} | {} | {} | {} | {} |",
        grouped(keys.len() as f64),
        shown(baseline),
        shown(governor),
        shown(limitador),
        shown(generic),
        shown(awaited),
        shown(at_once)
    ));
}

pub fn limiter() -> RateLimiter {
    block_on(async {
        // Nothing is read again within a run, however slow the machine.
        let builder = RateLimiter::builder(MemoryStore::new()).cache_capacity(2_000_000);
        let builder = builder.cache_ttl(std::time::Duration::from_secs(3_600));
        let limiter = builder.open().await.expect("in memory");
        limiter.set_resource_defaults("gpt-4", limits()).await.expect("in memory");
        limiter
    })
}

pub async fn acquire_and_commit(limiter: &RateLimiter, key: &str) {
    let acquire = limiter.acquire(key, "gpt-4").take("rpm", 1).take("tpm", 10);
    let lease = acquire.await.expect("within the limits");
    lease.commit().await.expect("nothing to write");
}

pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(work)
}

/// Makes decisions only, with this limiter or with governor.
pub fn profile(peer: &str, count: usize) {
    let keys = keys(count);
    let mut walk = Walk::new(0, count);
    let operations = 100_000.max(20 * count);
    if peer == "governor" {
        let governor = Governor::new();
        return (0..operations).for_each(|_| governor.decide(&keys[walk.next_place()]));
    }
    let limiter = limiter();
    block_on(async {
        for _ in 0..operations {
            acquire_and_commit(&limiter, &keys[walk.next_place()]).await;
        }
    });
}
