//! The same calls without an async runtime.

use std::sync::Arc;

use zae_limiter::store::Store;
use zae_limiter::testing::{Clock, SystemClock};
use zae_limiter::{Error, Lease, OnUnavailable, RateLimiter, blocking};
use zae_limiter_testkit::Fault;

use crate::world::{Kind, World, ms, without_refill};

fn on_every_store(test: impl Fn(&World, &RateLimiter)) {
    for kind in Kind::ALL {
        let world = World::new(*kind);
        let limiter = blocking::open(world.builder()).unwrap();
        let defaults = limiter.set_system_defaults([without_refill("tpm", 100)], None);
        blocking::wait(defaults).unwrap();
        test(&world, &limiter);
    }
}

fn left(limiter: &RateLimiter) -> i64 {
    let statuses = blocking::wait(limiter.available("key", "gpt-4", &[])).unwrap();
    statuses[0].available.whole_tokens()
}

fn take(limiter: &RateLimiter, tokens: u64) -> Result<Lease, Error> {
    blocking::wait(limiter.acquire("key", "gpt-4").take("tpm", tokens))
}

#[test]
fn tokens_are_taken_adjusted_and_refunded() {
    on_every_store(|_, limiter| {
        let mut kept = take(limiter, 10).unwrap();
        kept.adjust("tpm", 5).unwrap();
        blocking::wait(kept.commit()).unwrap();
        assert_eq!(left(limiter), 85);
        let undone = take(limiter, 85).unwrap();
        assert!(matches!(take(limiter, 1), Err(Error::Exceeded(_))));
        blocking::wait(undone.rollback()).unwrap();
        assert_eq!(left(limiter), 85);
        drop(take(limiter, 20).unwrap());
        // The writer of the store works in order: what was dropped comes before this.
        blocking::wait(take(limiter, 0).unwrap().commit()).unwrap();
        assert_eq!(left(limiter), 85);
    });
}

#[test]
fn work_is_run_with_a_lease() {
    on_every_store(|_, limiter| {
        let call = || limiter.acquire("key", "gpt-4").take("tpm", 10);
        let done: Result<&str, Error> = blocking::run(call(), |lease| {
            lease.settle("tpm", 30)?;
            Ok("done")
        });
        assert_eq!(done.unwrap(), "done");
        assert_eq!(left(limiter), 70);
        let failed: Result<(), Error> =
            blocking::run(call(), |_| Err(Error::NotInLease(String::new())));
        assert!(matches!(failed, Err(Error::NotInLease(_))));
        assert_eq!(left(limiter), 70);
        let all = limiter.acquire("key", "gpt-4").take("tpm", 71);
        let refused: Result<(), Error> = blocking::run(all, |_| unreachable!());
        assert!(matches!(refused, Err(Error::Exceeded(_))));
    });
}

#[test]
fn threads_share_one_limiter() {
    on_every_store(|_, limiter| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let limiter = limiter.clone();
                std::thread::spawn(move || {
                    for admitted in 0..200 {
                        let Ok(lease) = take(&limiter, 1) else { return admitted };
                        blocking::wait(lease.commit()).unwrap();
                    }
                    panic!("one thread alone was admitted twice what there is");
                })
            })
            .collect();
        let admitted: i32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(admitted, 100);
    });
}

#[test]
fn a_call_to_a_store_that_hangs_ends_with_its_deadline() {
    // Waits for real time, but not for long: no other clock can wake a thread.
    for kind in Kind::ALL {
        let world = World::new(*kind);
        let store: Arc<dyn Store> = Arc::clone(&world.store) as Arc<dyn Store>;
        let builder = RateLimiter::builder(store).deadline(ms(5));
        let limiter = blocking::open(builder.clock(Arc::new(SystemClock))).unwrap();
        world.store.break_down(Fault::Hang);
        let before = SystemClock.stopwatch();
        let done = take(&limiter, 1);
        assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
        let allowed = limiter.acquire("key", "gpt-4").take("tpm", 1);
        let lease = blocking::wait(allowed.on_unavailable(OnUnavailable::Allow)).unwrap();
        assert!(lease.is_degraded());
        assert!(SystemClock.stopwatch() - before >= ms(10));
    }
}

/// Calls of a store that hangs, and of one that has to be waited for: both need timers.
fn wait_within(limiter: &RateLimiter, hung: &RateLimiter) {
    let done = take(hung, 1);
    assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
    drop(take(limiter, 100).unwrap());
    blocking::wait(take(limiter, 100).unwrap().commit()).unwrap();
    let waiting = limiter.acquire("key", "gpt-4").take("tpm", 1).wait_up_to(ms(3));
    let refused = blocking::wait(waiting);
    assert!(matches!(refused, Err(Error::Exceeded(_))), "{refused:?}");
    blocking::wait(limiter.children("key").unwrap().all()).unwrap();
}

/// Fails if the work does not end. It waits for real time only then.
fn ends(what: &str, work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    let ended = is_done.recv_timeout(std::time::Duration::from_secs(60));
    assert_ne!(ended, Err(std::sync::mpsc::RecvTimeoutError::Timeout), "{what}: it hangs");
    thread.join().unwrap_or_else(|_| panic!("{what}: it panicked"));
}

/// Calls on drop, like a guard of a program that is ended.
struct OnDrop(Option<Box<dyn FnOnce() + Send>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.take().expect("dropped once")();
    }
}

/// A place to call from.
type Place = fn(Box<dyn FnOnce() + Send>);

const PLACES: [(&str, Place); 7] = [
    ("a runtime of one thread", |work| one_thread(true).block_on(async { work() })),
    ("a runtime without timers", |work| one_thread(false).block_on(async { work() })),
    ("a task of one thread", |work| {
        let runtime = one_thread(true);
        runtime.block_on(runtime.spawn(async { work() })).expect("no panic");
    }),
    ("a local set", |work| {
        let local = tokio::task::LocalSet::new();
        local.block_on(&one_thread(true), async {
            tokio::task::spawn_local(async { work() }).await.expect("no panic");
        });
    }),
    ("a blocking task", |work| {
        let runtime = one_thread(true);
        runtime.block_on(runtime.spawn_blocking(work)).expect("no panic");
    }),
    ("a worker of many", |work| {
        let runtime = crate::world::threads();
        runtime.block_on(runtime.spawn(async { work() })).expect("no panic");
    }),
    ("a runtime that shuts down", |work| {
        let runtime = one_thread(true);
        let guard = OnDrop(Some(work));
        runtime.spawn(async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        });
        runtime.block_on(tokio::task::yield_now());
        drop(runtime);
    }),
];

fn one_thread(timers: bool) -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    if timers {
        builder.enable_time();
    }
    builder.build().unwrap()
}

#[test]
fn a_call_within_a_runtime_ends_wherever_it_is_made() {
    for kind in Kind::ALL {
        for (what, place) in PLACES {
            ends(&format!("{what}, {kind:?}"), move || {
                let open = |world: &World| {
                    let store: Arc<dyn Store> = Arc::clone(&world.store) as Arc<dyn Store>;
                    let builder = RateLimiter::builder(store).clock(Arc::new(SystemClock));
                    let limits = [without_refill("tpm", 100)];
                    builder.default_limits(limits)
                };
                let (sound, broken) = (World::new(*kind), World::new(*kind));
                let limiter = blocking::open(open(&sound)).unwrap();
                let hung = blocking::open(open(&broken).deadline(ms(5))).unwrap();
                broken.store.break_down(Fault::Hang);
                place(Box::new(move || wait_within(&limiter, &hung)));
            });
        }
    }
}

#[cfg(feature = "infra")]
#[test]
fn a_stack_is_deployed_without_a_runtime() {
    use std::io::{Read as _, Write as _};
    use zae_limiter::dynamodb::aws::DynamoAddress;
    use zae_limiter::infra::StackOptions;

    // An endpoint that denies everything.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 16 * 1_024]);
            let body = "<ErrorResponse><Error><Code>AccessDenied</Code>\
                        <Message>not you</Message></Error></ErrorResponse>";
            let _ = write!(
                stream,
                "HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
        }
    });
    let options = StackOptions::new("my-app".parse().unwrap()).no_aggregator();
    let region = Some("us-east-1".to_owned());
    let address = DynamoAddress { table: String::new(), region, endpoint: Some(endpoint) };
    let deployed = blocking::wait(zae_limiter::ensure_stack(&options, &address, None));
    let Err(zae_limiter::infra::StackError::Deploy(error)) = deployed else {
        panic!("it is denied")
    };
    assert!(error.to_string().contains("permission") || format!("{error:?}").contains("not you"));
}
