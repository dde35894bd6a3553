//! A measurement: steady calls while the endpoint hangs and comes back.
//!
//! `cargo test --release -p zae-limiter-dynamodb --features endpoint-tests --test endpoint -- --ignored --nocapture
//! hung_endpoint`. `ZAEL_HANG_SECONDS` is the length of the hang, 5 by default. The run takes real time and
//! prints what it saw. It fails only if a call does not end, or a bucket is not served again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use zae_limiter_core::{Clock as _, Error, Limit, OnUnavailable, RateLimiter, SystemClock};
use zae_limiter_dynamodb::aws::{DynamoAddress, LazyTable};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use crate::proxy::{Mode, Proxy};
use crate::server::{endpoint, new_table};

const CALLS_A_SECOND: u32 = 1_000;
const BUCKETS: usize = 100;
const DEADLINE: Duration = Duration::from_secs(1);
/// The deadline and 10 %: until then a call must have ended.
const TOLERATED: Duration = Duration::from_millis(1_100);
const HEALTHY: Duration = Duration::from_secs(5);
/// How long the load goes on for buckets that are not served again.
const RECOVERY_MAX: Duration = Duration::from_secs(60);
/// How long after the load all calls must have ended.
const LAST_CALL_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Admitted,
    Refused,
    Unavailable,
    Failed,
}

/// One call; times are since the start of the run.
#[derive(Clone, Copy, Debug)]
struct Call {
    bucket: usize,
    began: Duration,
    took: Duration,
    ended: Ended,
}

/// What happened to the calls that began in one phase.
#[derive(Debug)]
struct Phase {
    name: &'static str,
    began: Duration,
    calls: u64,
    /// Requests that the proxy read.
    requests: u64,
    memory_max: u64,
}

struct Load {
    limiter: RateLimiter,
    names: Vec<Arc<str>>,
    calls: mpsc::UnboundedSender<Call>,
    sent: usize,
    /// The buckets of which a call was admitted since the endpoint came back.
    served: Arc<Vec<AtomicBool>>,
}

impl Load {
    /// Sends calls at a steady rate, whether or not earlier ones have ended.
    async fn run(
        &mut self,
        proxy: &Proxy,
        name: &'static str,
        is_over: impl Fn(Duration) -> bool,
    ) -> Phase {
        let began = SystemClock.stopwatch();
        let before = proxy.requests();
        let mut phase = Phase { name, began, calls: 0, requests: 0, memory_max: memory() };
        loop {
            let elapsed = SystemClock.stopwatch() - began;
            phase.requests = proxy.requests() - before;
            if is_over(elapsed) {
                return phase;
            }
            let due = elapsed.as_millis() * u128::from(CALLS_A_SECOND) / 1_000;
            while u128::from(phase.calls) < due {
                self.call();
                phase.calls += 1;
            }
            phase.memory_max = phase.memory_max.max(memory());
            SystemClock.sleep(Duration::from_millis(5)).await;
        }
    }

    fn call(&mut self) {
        let bucket = self.sent % BUCKETS;
        self.sent += 1;
        let (limiter, name) = (self.limiter.clone(), Arc::clone(&self.names[bucket]));
        let (calls, served) = (self.calls.clone(), Arc::clone(&self.served));
        tokio::spawn(async move {
            let began = SystemClock.stopwatch();
            let call = limiter.acquire(&name, "gpt-4").take("rps", 1);
            let ended = match call.on_unavailable(OnUnavailable::Block).await {
                // Nothing is left to write: the commit only keeps what was taken.
                Ok(mut lease) => match lease.commit().await {
                    Ok(()) => Ended::Admitted,
                    Err(_) => Ended::Failed,
                },
                Err(Error::Exceeded(_)) => Ended::Refused,
                Err(Error::Unavailable { .. }) => Ended::Unavailable,
                Err(_) => Ended::Failed,
            };
            let took = SystemClock.stopwatch() - began;
            served[bucket].fetch_or(ended == Ended::Admitted, Ordering::Relaxed);
            // The run waits for every call.
            let _ = calls.send(Call { bucket, began, took, ended });
        });
    }
}

/// Resident memory of this process in KiB; the proxy is part of it.
fn memory() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_u64) * 4
}

fn hang() -> Duration {
    let seconds = std::env::var("ZAEL_HANG_SECONDS").ok().map(|text| text.parse().unwrap());
    Duration::from_secs(seconds.unwrap_or(5))
}

fn report(phase: &Phase, next: Duration, calls: &[Call]) {
    let own: Vec<&Call> =
        calls.iter().filter(|call| call.began >= phase.began && call.began < next).collect();
    let count = |ended| own.iter().filter(|call| call.ended == ended).count();
    let mut took: Vec<Duration> = own.iter().map(|call| call.took).collect();
    took.sort_unstable();
    let at = |share: usize| took.get(took.len() * share / 1_000).copied().unwrap_or_default();
    println!(
        "{}: {} calls; {} ended within {TOLERATED:?}; p50 {:?}, p99.9 {:?}, longest {:?}; \
         admitted {}, refused {}, unavailable {}, failed {}; {} requests; memory at most {} KiB",
        phase.name,
        own.len(),
        took.iter().filter(|took| **took <= TOLERATED).count(),
        at(500),
        at(999),
        took.last().copied().unwrap_or_default(),
        count(Ended::Admitted),
        count(Ended::Refused),
        count(Ended::Unavailable),
        count(Ended::Failed),
        phase.requests,
        phase.memory_max,
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement of 15 s and more in real time; run it by name with --ignored --nocapture"]
async fn hung_endpoint() {
    let table = new_table().await;
    let proxy = Proxy::to(&endpoint());
    let address = DynamoAddress {
        table: table.name().to_owned(),
        region: Some("us-east-1".to_owned()),
        endpoint: Some(proxy.url.clone()),
    };
    let store = DynamoStore::new(Arc::new(LazyTable::new(address)), DynamoOptions::default());
    let limiter = RateLimiter::builder(store).deadline(DEADLINE).open().await.unwrap();
    limiter.set_system_defaults([Limit::per_second("rps", 1_000)], None).await.unwrap();
    let (calls, mut ended) = mpsc::unbounded_channel();
    let names = (0..BUCKETS).map(|n| format!("key-{n}").into()).collect();
    let served: Arc<Vec<AtomicBool>> =
        Arc::new((0..BUCKETS).map(|_| AtomicBool::default()).collect());
    let mut load = Load { limiter, names, calls, sent: 0, served: Arc::clone(&served) };
    println!("before: memory {} KiB", memory());

    let hung_for = hang();
    let healthy = load.run(&proxy, "healthy", |elapsed| elapsed >= HEALTHY).await;
    proxy.set(Mode::Hang);
    let hung = load.run(&proxy, "hung", |elapsed| elapsed >= hung_for).await;
    proxy.set(Mode::Pass);
    for bucket in served.iter() {
        bucket.store(false, Ordering::Relaxed);
    }
    let all_served = || served.iter().all(|bucket| bucket.load(Ordering::Relaxed));
    let recovered = load.run(&proxy, "recovered", |elapsed| {
        elapsed >= RECOVERY_MAX || elapsed >= HEALTHY && all_served()
    });
    let recovered = recovered.await;

    let sent = load.sent;
    drop(load);
    let mut all: Vec<Call> = Vec::with_capacity(sent);
    let late = SystemClock.sleep(LAST_CALL_MAX);
    let collect = async {
        while let Some(call) = ended.recv().await {
            all.push(call);
        }
    };
    tokio::select! {
        () = collect => {}
        () = late => {}
    }
    report(&healthy, hung.began, &all);
    report(&hung, recovered.began, &all);
    report(&recovered, Duration::MAX, &all);
    println!("after: memory {} KiB", memory());
    assert_eq!(all.len(), sent, "every call ends");

    let mut again = vec![Duration::MAX; BUCKETS];
    for call in all.iter().filter(|call| call.ended == Ended::Admitted) {
        let since = (call.began + call.took).saturating_sub(recovered.began);
        if !since.is_zero() {
            again[call.bucket] = again[call.bucket].min(since);
        }
    }
    let count = again.iter().filter(|since| **since != Duration::MAX).count();
    assert_eq!(count, BUCKETS, "every bucket is served again");
    let (first, last) = (again.iter().min().unwrap(), again.iter().max().unwrap());
    println!(
        "after the endpoint came back, the first bucket was served in {first:?}, all in {last:?}"
    );
}
