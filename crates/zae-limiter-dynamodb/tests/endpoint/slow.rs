//! An endpoint that answers late or not at all: calls end at their deadline, to the millisecond of
//! the limiter's clock, and what a late answer took is refunded.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tokio::sync::mpsc;
use zae_limiter_core::{Error, Limit, ManualClock, OnUnavailable, RateLimiter, Timestamp};
use zae_limiter_dynamodb::aws::AwsTable;
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use crate::server::{client_at, clock, endpoint, new_table};

const DEADLINE: Duration = Duration::from_millis(500);
const MILLISECOND: Duration = Duration::from_millis(1);
/// How often the table is read until the background refund is there.
const LOOKS_MAX: usize = 10_000;

/// The way to the endpoint, which can be blocked: requests are then kept until it is free again.
struct Way {
    url: String,
    gate: Arc<Gate>,
    /// Says when a request is being kept.
    kept: mpsc::UnboundedReceiver<()>,
}

struct Gate {
    is_blocked: Mutex<bool>,
    freed: Condvar,
    keeps: mpsc::UnboundedSender<()>,
}

impl Gate {
    fn set(&self, is_blocked: bool) {
        *self.is_blocked.lock().unwrap() = is_blocked;
        self.freed.notify_all();
    }

    fn pass(&self) {
        let mut is_blocked = self.is_blocked.lock().unwrap();
        if *is_blocked {
            let _ = self.keeps.send(());
        }
        while *is_blocked {
            is_blocked = self.freed.wait(is_blocked).unwrap();
        }
    }
}

impl Way {
    fn to(endpoint: &str) -> Self {
        let there = endpoint.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (keeps, kept) = mpsc::unbounded_channel();
        let gate = Arc::new(Gate { is_blocked: Mutex::new(false), freed: Condvar::new(), keeps });
        let shared = Arc::clone(&gate);
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(&there).unwrap());
                let (requests, answers) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let gate = Arc::clone(&shared);
                std::thread::spawn(move || carry(requests, far, || gate.pass()));
                std::thread::spawn(move || carry(answers, near, || ()));
            }
        });
        Self { url, gate, kept }
    }
}

/// Forwards bytes until either side closes.
fn carry(mut from: TcpStream, mut to: TcpStream, pass: impl Fn()) {
    let mut bytes = [0; 16 * 1_024];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        pass();
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}

async fn limiter(endpoint: &str, table: &str, clock: &Arc<ManualClock>) -> RateLimiter {
    let table = AwsTable::new(client_at(endpoint), table, crate::server::clock());
    let store = DynamoStore::new(Arc::new(table), DynamoOptions::default());
    let builder = RateLimiter::builder(store).clock(Arc::clone(clock) as Arc<_>);
    builder.deadline(DEADLINE).open().await.unwrap()
}

async fn left(limiter: &RateLimiter) -> i64 {
    let limits = limiter.available("key-1", "gpt-4", &[]).await.unwrap();
    limits[0].available.get() / 1_000
}

/// Waits until so many are left, as the table itself says.
async fn wait_until_left(limiter: &RateLimiter, wanted: i64) {
    for _ in 0..LOOKS_MAX {
        if left(limiter).await == wanted {
            return;
        }
    }
    panic!("{} are left, not {wanted}", left(limiter).await);
}

// On one thread: a call has set its timer before what it sends is carried out.
#[tokio::test(flavor = "current_thread")]
async fn a_call_ends_at_its_deadline_and_a_late_answer_loses_nothing() {
    let table = new_table().await;
    let mut way = Way::to(&endpoint());
    let time = Arc::new(ManualClock::new(Timestamp::from_millis(clock().now().as_millis())));
    let direct = limiter(&endpoint(), table.name(), &time).await;
    let slow = limiter(&way.url, table.name(), &time).await;
    direct.set_limits("key-1", Some("gpt-4"), [Limit::per_day("runs", 10)]).await.unwrap();
    let take = |policy| {
        let slow = slow.clone();
        tokio::spawn(async move {
            slow.acquire("key-1", "gpt-4").take("runs", 1).on_unavailable(policy).await
        })
    };
    let take_and_commit = async || {
        take(OnUnavailable::Block).await.unwrap().unwrap().commit().await.unwrap();
    };
    take_and_commit().await;
    let mut wanted = 9;
    assert_eq!(left(&direct).await, wanted);
    for policy in [OnUnavailable::Block, OnUnavailable::Allow] {
        way.gate.set(true);
        let call = take(policy);
        way.kept.recv().await.unwrap();
        time.advance(DEADLINE - MILLISECOND);
        // The direct way is free: many a turn for the other, which has none to take.
        assert_eq!(left(&direct).await, wanted);
        assert!(!call.is_finished(), "it waits as long as it may");
        time.advance(MILLISECOND);
        match (policy, call.await.unwrap()) {
            (OnUnavailable::Block, Err(error @ Error::Unavailable { .. })) => {
                let cause = std::error::Error::source(&error).unwrap().to_string();
                assert!(cause.contains("before the deadline"), "{error}: {cause}");
            }
            (OnUnavailable::Allow, Ok(lease)) => assert!(lease.is_degraded()),
            (_, other) => panic!("{policy:?}: {other:?}"),
        }
        // Now the write arrives, for somebody who has gone away, and must be taken back. The next one
        // goes behind it.
        way.gate.set(false);
        take_and_commit().await;
        wanted -= 1;
        wait_until_left(&direct, wanted).await;
    }
}
