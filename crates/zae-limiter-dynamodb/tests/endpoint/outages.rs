//! Steady calls while the endpoint hangs, is down, or loses answers, and after it is up again.
//!
//! Each has a short form, which checks what holds on any machine, and a measurement, which also checks times
//! and memory and prints what it saw: 1,000 calls a second on 100 buckets.
//!
//! `ZAEL_HANG_SECONDS=60.3 cargo test --release -p zae-limiter-dynamodb --features endpoint-tests --test endpoint
//! outages -- --ignored --nocapture`. `ZAEL_HANG_SECONDS` is the length of the outage, 5.15 by default. The store is
//! probed about each second, counted from the first failure, and each probe is some milliseconds later than that. The
//! fraction of the length decides whether the outage ends right before a probe, which is the best case, or right
//! after one, which is the worst. The measurements run one after the other.

use std::time::Duration;

use tokio::sync::Mutex;
use zae_limiter_core::Lease;

use crate::load::{Load, Ran, Shape, TAKEN, UNUSED, counted};
use crate::proxy::Mode;

/// How long after an outage all buckets are served again.
const RECOVERY_MAX: Duration = Duration::from_secs(2);

/// Two measurements at once would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// Enough for the breaker to open and to probe again.
const SHORT: Shape = Shape {
    calls_a_second: 200,
    buckets: 20,
    healthy: Duration::from_millis(500),
    outage: Duration::from_millis(2_500),
    short_of: (0, 0),
    gives_back: false,
};

fn long() -> Shape {
    let seconds = std::env::var("ZAEL_HANG_SECONDS").ok().map(|text| text.parse().unwrap());
    let seconds: f64 = seconds.unwrap_or(5.15);
    Shape {
        calls_a_second: 1_000,
        buckets: 100,
        healthy: Duration::from_secs(5),
        outage: Duration::from_secs_f64(seconds),
        short_of: (0, 0),
        gives_back: false,
    }
}

/// Some buckets run dry half way through the outage, and some callers give tokens back.
fn with_lost_answers(shape: Shape) -> Shape {
    let calls = shape.calls_a_second as usize / shape.buckets;
    let seconds = (shape.healthy + shape.outage / 2).as_secs_f64();
    #[expect(clippy::cast_possible_truncation, reason = "a few minutes")]
    let budget = (seconds * 1_000.0) as i64 * i64::try_from(calls).unwrap() * TAKEN / 1_000;
    Shape { short_of: (shape.buckets / 5, budget), gives_back: true, ..shape }
}

async fn play(shape: Shape, outage: Mode) -> (Load, Ran) {
    let mut load = Load::new(shape).await;
    let ran = load.run(outage).await;
    println!("{outage:?} for {:?}", shape.outage);
    ran.print();
    ran.check();
    load.check_accounting(&ran).await;
    (load, ran)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_an_endpoint_that_hangs_end_and_are_served_after_it() {
    play(SHORT, Mode::Hang).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_an_endpoint_that_is_down_end_and_are_served_after_it() {
    play(SHORT, Mode::Refuse).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answers_admit_nothing_beyond_the_limit() {
    let (load, _) = play(with_lost_answers(SHORT), Mode::DropAnswers).await;
    assert!(load.proxy.lost() > 0, "answers were lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_whose_answer_is_lost_is_not_applied_twice() {
    refund(SHORT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement of 15 s and more in real time; run it by name with --ignored --nocapture"]
async fn hung_endpoint() {
    let _alone = ONE_AT_A_TIME.lock().await;
    play(long(), Mode::Hang).await.1.check_promise(RECOVERY_MAX);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement of 15 s and more in real time; run it by name with --ignored --nocapture"]
async fn killed_endpoint() {
    let _alone = ONE_AT_A_TIME.lock().await;
    play(long(), Mode::Refuse).await.1.check_promise(RECOVERY_MAX);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement of 15 s and more in real time; run it by name with --ignored --nocapture"]
async fn lost_answers() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (load, ran) = play(with_lost_answers(long()), Mode::DropAnswers).await;
    println!("{} answers were lost", load.proxy.lost());
    assert!(load.proxy.lost() > 0, "answers were lost");
    ran.check_promise(RECOVERY_MAX);
    refund(long()).await;
}

/// Takes while every answer arrives, and refunds while some are lost: a take whose answer is lost
/// cannot hide a refund that is applied twice.
async fn refund(shape: Shape) {
    const LEASES: usize = 20;
    let load = Load::new(shape).await;
    let mut leases: Vec<(usize, Lease)> = Vec::new();
    for _ in 0..LEASES {
        for (bucket, name) in load.names.iter().enumerate() {
            let taken = u64::try_from(TAKEN).unwrap();
            // The deadline is no matter here: a machine may be slow.
            let call = load.limiter.acquire(name, "gpt-4").deadline(Duration::from_secs(60));
            leases.push((bucket, call.take("budget", taken).await.unwrap()));
        }
    }
    load.proxy.set(Mode::DropAnswers);
    let refunds = leases.into_iter().map(|(bucket, mut lease)| {
        tokio::spawn(async move {
            lease.adjust("budget", -UNUSED).unwrap();
            (bucket, lease.commit().await)
        })
    });
    let (mut unanswered, refunds) = (vec![0; load.names.len()], refunds.collect::<Vec<_>>());
    for refund in refunds {
        let (bucket, committed) = refund.await.unwrap();
        unanswered[bucket] += i64::from(committed.is_err());
    }
    load.proxy.set(Mode::Pass);
    let all_once = i64::try_from(LEASES).unwrap() * (TAKEN - UNUSED) * 1_000;
    for (bucket, counted) in counted(&load.table, &load.names).await.into_iter().enumerate() {
        let at_most = all_once + unanswered[bucket] * UNUSED * 1_000;
        let consumed = counted.consumed;
        assert!(all_once <= consumed, "bucket {bucket}: {consumed}, and {all_once} are held");
        assert!(consumed <= at_most, "bucket {bucket}: {consumed} of at most {at_most}");
    }
    println!(
        "{} refunds, {} without an answer, {} answers lost: none was applied twice",
        LEASES * load.names.len(),
        unanswered.iter().sum::<i64>(),
        load.proxy.lost()
    );
    assert!(load.proxy.lost() > 0, "answers were lost");
}
