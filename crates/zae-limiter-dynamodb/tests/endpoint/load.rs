//! Steady calls on many buckets, through a proxy that fails for a while, and what became of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use tokio::sync::mpsc;
use zae_limiter_core::{Clock as _, Error, Limit, OnUnavailable, RateLimiter, SystemClock};
use zae_limiter_dynamodb::aws::{DynamoAddress, LazyTable};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use crate::proxy::{Mode, Proxy};
use crate::server::{client, endpoint, new_table};

pub(crate) const DEADLINE: Duration = Duration::from_secs(1);
/// The deadline and 10 %: until then a call must have ended.
pub(crate) const TOLERATED: Duration = Duration::from_millis(1_100);
/// How long the load goes on for buckets that are not served again.
const RECOVERY_MAX: Duration = Duration::from_secs(60);
/// How long after the load all calls must have ended.
const LAST_CALL_MAX: Duration = Duration::from_secs(60);

/// What each call takes of the limit whose accounting is checked.
pub(crate) const TAKEN: i64 = 10;
/// What some calls refund of it when they commit.
pub(crate) const UNUSED: i64 = 4;
/// What a bucket can give of it during a run. It refills by one a day: for a run, not at all.
pub(crate) const BUDGET: i64 = 1_000_000;
/// What the daily token may add up to during a run, in millitokens.
const EARNED_MAX: i64 = 5;

/// How many calls, on how many buckets, for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) calls_a_second: u32,
    pub(crate) buckets: usize,
    /// How long the endpoint is in order before the outage, and at least afterwards.
    pub(crate) healthy: Duration,
    pub(crate) outage: Duration,
    /// The last so many buckets have this budget instead, which does not suffice for all calls.
    pub(crate) short_of: (usize, i64),
    /// Whether one call in eight refunds some of what it took, and another one all of it.
    pub(crate) gives_back: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Admitted,
    Refused,
    Unavailable,
    Failed,
}

/// One call; times are readings of the stopwatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) bucket: usize,
    pub(crate) began: Duration,
    /// The acquire or what settled it, whichever took longer: each has a deadline of its own.
    pub(crate) took: Duration,
    /// When both had ended.
    pub(crate) over: Duration,
    pub(crate) ended: Ended,
    /// What the caller holds for sure in the end, in tokens.
    pub(crate) kept: i64,
}

/// The calls that began in one phase.
#[derive(Debug)]
pub(crate) struct Phase {
    pub(crate) name: &'static str,
    pub(crate) began: Duration,
    pub(crate) until: Duration,
    /// Requests that the proxy read.
    requests: u64,
    /// Resident memory in KiB at most, in the first half of the phase and in the second.
    pub(crate) memory_max: [u64; 2],
}

/// All that a run came to.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) sent: usize,
    pub(crate) calls: Vec<Call>,
    /// Before the outage, during it, after it.
    pub(crate) phases: [Phase; 3],
    /// How long after the outage each bucket was served again.
    pub(crate) again: Vec<Duration>,
}

pub(crate) struct Load {
    pub(crate) shape: Shape,
    pub(crate) limiter: RateLimiter,
    pub(crate) proxy: Proxy,
    pub(crate) table: String,
    pub(crate) names: Vec<Arc<str>>,
    calls: Arc<Mutex<Vec<Call>>>,
    sent: usize,
    /// When each bucket last admitted a call, in nanoseconds of the stopwatch.
    served: Arc<Vec<AtomicU64>>,
}

fn limits(budget: i64) -> [Limit; 2] {
    let budget = u64::try_from(budget).unwrap();
    [Limit::per_second("rps", 1_000), Limit::per_day("budget", 1).burst(budget)]
}

impl Load {
    /// On a table of its own, through a proxy that passes everything on.
    pub(crate) async fn new(shape: Shape) -> Self {
        let table = new_table().await.name().to_owned();
        let proxy = Proxy::to(&endpoint());
        let address = DynamoAddress {
            table: table.clone(),
            region: Some("us-east-1".to_owned()),
            endpoint: Some(proxy.url.clone()),
        };
        let store = DynamoStore::new(Arc::new(LazyTable::new(address)), DynamoOptions::default());
        let limiter = RateLimiter::builder(store).deadline(DEADLINE).open().await.unwrap();
        limiter.set_system_defaults(limits(BUDGET), None).await.unwrap();
        let names: Vec<Arc<str>> = (0..shape.buckets).map(|n| format!("key-{n}").into()).collect();
        for name in &names[shape.buckets - shape.short_of.0..] {
            limiter.set_limits(name, None, limits(shape.short_of.1)).await.unwrap();
        }
        let served = Arc::new(names.iter().map(|_| AtomicU64::default()).collect());
        Self { shape, limiter, proxy, table, names, calls: Arc::default(), sent: 0, served }
    }

    pub(crate) fn budget_of(&self, bucket: usize) -> i64 {
        let (short, budget) = self.shape.short_of;
        if bucket >= self.shape.buckets - short { budget } else { BUDGET }
    }

    /// The load before an outage of this kind, during it, and until every bucket is served again.
    pub(crate) async fn run(&mut self, outage: Mode) -> Ran {
        let shape = self.shape;
        // What the run remembers of its calls is in memory before it is measured.
        let seconds = (shape.healthy * 3 + shape.outage).as_secs() + 1;
        let room = usize::try_from(seconds).unwrap() * shape.calls_a_second as usize;
        let blank = Call {
            bucket: 0,
            began: Duration::ZERO,
            took: Duration::ZERO,
            over: Duration::ZERO,
            ended: Ended::Failed,
            kept: 1,
        };
        self.calls.lock().unwrap().resize(room, blank);
        self.calls.lock().unwrap().clear();
        let (alive, mut ended) = mpsc::channel(1);

        let before = self.send(&alive, "before", |elapsed| elapsed >= shape.healthy).await;
        self.proxy.set(outage);
        let during = self.send(&alive, "outage", |elapsed| elapsed >= shape.outage).await;
        self.proxy.set(Mode::Pass);
        let (back, served) = (SystemClock.stopwatch(), Arc::clone(&self.served));
        // Those that are short of tokens may have none left to serve with.
        let watched = shape.buckets - shape.short_of.0;
        let is_served = |at: &AtomicU64| at.load(Ordering::Relaxed) >= nanos(back);
        let all_served = || served[..watched].iter().all(is_served);
        let is_over =
            |elapsed: Duration| elapsed >= RECOVERY_MAX || elapsed >= shape.healthy && all_served();
        let after = self.send(&alive, "after", is_over).await;
        drop(alive);
        tokio::select! {
            // Nobody sends anything: it ends with the last call.
            _ = ended.recv() => {}
            () = SystemClock.sleep(LAST_CALL_MAX) => {}
        }

        let calls = std::mem::take(&mut *self.calls.lock().unwrap());
        let mut again = vec![Duration::MAX; watched];
        for call in calls.iter().filter(|call| call.ended == Ended::Admitted) {
            if let (Some(since), Some(again)) =
                (call.over.checked_sub(back), again.get_mut(call.bucket))
            {
                *again = since.min(*again);
            }
        }
        Ran { sent: self.sent, calls, phases: [before, during, after], again }
    }

    /// Sends calls at a steady rate, whether or not earlier ones have ended.
    async fn send(
        &mut self,
        alive: &mpsc::Sender<()>,
        name: &'static str,
        is_over: impl Fn(Duration) -> bool,
    ) -> Phase {
        let began = SystemClock.stopwatch();
        let before = self.proxy.requests();
        let mut memory_seen = Vec::with_capacity(16_384);
        let mut calls = 0;
        loop {
            let elapsed = SystemClock.stopwatch() - began;
            if is_over(elapsed) {
                let (first, second) = memory_seen.split_at(memory_seen.len() / 2);
                let most = |seen: &[u64]| seen.iter().copied().max().unwrap_or_default();
                return Phase {
                    name,
                    began,
                    until: began + elapsed,
                    requests: self.proxy.requests() - before,
                    memory_max: [most(first), most(second)],
                };
            }
            let due = elapsed.as_millis() * u128::from(self.shape.calls_a_second) / 1_000;
            while calls < due {
                self.call(alive.clone());
                calls += 1;
            }
            memory_seen.push(memory());
            SystemClock.sleep(Duration::from_millis(5)).await;
        }
    }

    fn call(&mut self, alive: mpsc::Sender<()>) {
        let (bucket, turn) = (self.sent % self.shape.buckets, self.sent / self.shape.buckets % 8);
        self.sent += 1;
        let unused = match turn {
            0 if self.shape.gives_back => UNUSED,
            4 if self.shape.gives_back => TAKEN,
            _ => 0,
        };
        let (limiter, name) = (self.limiter.clone(), Arc::clone(&self.names[bucket]));
        let (calls, served) = (Arc::clone(&self.calls), Arc::clone(&self.served));
        tokio::spawn(async move {
            let began = SystemClock.stopwatch();
            let taken = u64::try_from(TAKEN).unwrap();
            let call = limiter.acquire(&name, "gpt-4").take("rps", 1).take("budget", taken);
            let acquired = call.on_unavailable(OnUnavailable::Block).await;
            let took = SystemClock.stopwatch() - began;
            let (ended, kept) = match acquired {
                Ok(mut lease) => {
                    lease.adjust("budget", -unused).unwrap();
                    // A commit whose answer is lost may have refunded what is unused, or not.
                    match lease.commit().await {
                        Ok(()) | Err(Error::Unavailable { .. } | Error::Store(_)) => {
                            (Ended::Admitted, TAKEN - unused)
                        }
                        Err(_) => (Ended::Failed, TAKEN - unused),
                    }
                }
                Err(Error::Exceeded(_)) => (Ended::Refused, 0),
                Err(Error::Unavailable { .. }) => (Ended::Unavailable, 0),
                Err(_) => (Ended::Failed, 0),
            };
            let over = SystemClock.stopwatch();
            let took = took.max((over - began).saturating_sub(took));
            if ended == Ended::Admitted {
                served[bucket].fetch_max(nanos(over), Ordering::Relaxed);
            }
            calls.lock().unwrap().push(Call { bucket, began, took, over, ended, kept });
            drop(alive);
        });
    }

    /// Compares what callers hold with what the table has counted, for every bucket.
    pub(crate) async fn check_accounting(&self, ran: &Ran) {
        let mut kept = vec![0; self.shape.buckets];
        ran.calls.iter().for_each(|call| kept[call.bucket] += call.kept);
        let counted = counted(&self.table, &self.names).await;
        let (mut held, mut taken, mut emptied) = (0, 0, 0);
        for (bucket, Counted { consumed, tokens }) in counted.into_iter().enumerate() {
            let (budget, kept) = (self.budget_of(bucket) * 1_000, kept[bucket] * 1_000);
            assert!(
                kept <= consumed,
                "bucket {bucket}: callers hold {kept}, of {consumed} counted"
            );
            assert!(consumed <= budget + EARNED_MAX, "bucket {bucket}: {consumed} of {budget}");
            assert!(tokens >= 0, "bucket {bucket} has {tokens}");
            let sum = consumed + tokens;
            let conserved = budget..=budget + EARNED_MAX;
            assert!(conserved.contains(&sum), "bucket {bucket}: {consumed} and {tokens} is {sum}");
            (held, taken) = (held + kept, taken + consumed);
            emptied += usize::from(tokens < TAKEN * 1_000);
        }
        println!(
            "callers hold {} tokens, the table has counted {}; {emptied} buckets are used up",
            held / 1_000,
            taken / 1_000
        );
    }
}

/// What the table says of the budget of a bucket, all its items together, in millitokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    /// Taken less refunded.
    pub(crate) consumed: i64,
    /// What is there.
    pub(crate) tokens: i64,
}

/// Past the proxy and the store: the items themselves.
pub(crate) async fn counted(table: &str, names: &[Arc<str>]) -> Vec<Counted> {
    let scan = client().scan().table_name(table).consistent_read(true).into_paginator().items();
    let items: Vec<_> = scan.send().try_collect().await.unwrap();
    let mut counted = vec![Counted::default(); names.len()];
    for item in &items {
        let AttributeValue::S(key) = &item["PK"] else { panic!("a key is a text") };
        let is_its = |name: &Arc<str>| key.contains(&format!("#{name}#"));
        let number = |name: &str| {
            let number = item.get(name).and_then(|value| value.as_n().ok());
            number.map(|number| number.parse::<i64>().unwrap())
        };
        if let (Some(at), Some(consumed), Some(tokens)) =
            (names.iter().position(is_its), number("b_budget_tc"), number("b_budget_tk"))
        {
            counted[at].consumed += consumed;
            counted[at].tokens += tokens;
        }
    }
    counted
}

impl Ran {
    pub(crate) fn print(&self) {
        for phase in &self.phases {
            let is_own = |call: &&Call| call.began >= phase.began && call.began < phase.until;
            let own: Vec<&Call> = self.calls.iter().filter(is_own).collect();
            let count = |ended| own.iter().filter(|call| call.ended == ended).count();
            let mut took: Vec<Duration> = own.iter().map(|call| call.took).collect();
            took.sort_unstable();
            let at = |share: usize| took.get(took.len() * share / 1_000).copied();
            println!(
                "{}: {} calls, {} within {TOLERATED:?}; p50 {:?}, p99.9 {:?}, longest {:?}; \
                 admitted {}, refused {}, unavailable {}, failed {}; {} requests; \
                 memory at most {} KiB, then {} KiB",
                phase.name,
                own.len(),
                took.iter().filter(|took| **took <= TOLERATED).count(),
                at(500).unwrap_or_default(),
                at(999).unwrap_or_default(),
                took.last().copied().unwrap_or_default(),
                count(Ended::Admitted),
                count(Ended::Refused),
                count(Ended::Unavailable),
                count(Ended::Failed),
                phase.requests,
                phase.memory_max[0],
                phase.memory_max[1],
            );
        }
        let (first, last) = (self.again.iter().min(), self.again.iter().max());
        println!("after the outage: the first bucket served in {first:?}, all in {last:?}");
    }

    /// What holds on any machine, however slow: every call ends, none fails in another way than that the
    /// store does not answer, and every bucket is served again.
    pub(crate) fn check(&self) {
        assert_eq!(self.calls.len(), self.sent, "every call ends");
        assert!(self.calls.iter().all(|call| call.ended != Ended::Failed), "no call fails");
        assert!(self.again.iter().all(|since| *since != Duration::MAX), "all are served again");
    }

    /// What is promised of a machine that has the time for it.
    pub(crate) fn check_promise(&self, recovery_max: Duration) {
        let late: Vec<&Call> = self.calls.iter().filter(|call| call.took > TOLERATED).collect();
        assert!(late.is_empty(), "{} calls took longer than {TOLERATED:?}: {late:?}", late.len());
        let last = self.again.iter().max().unwrap();
        assert!(*last <= recovery_max, "all were served again only after {last:?}");
        let [first, second] = self.phases[1].memory_max;
        assert!(second <= first + first / 10, "memory grew from {first} to {second} KiB");
    }
}

fn nanos(since: Duration) -> u64 {
    u64::try_from(since.as_nanos()).unwrap()
}

/// Resident memory of this process in KiB; the proxy is part of it.
fn memory() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_u64) * 4
}
