//! Entity ids are often API keys: no log line, no span and no error text contains one, on any store.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[expect(dead_code, reason = "shared with the other tests, which use all of it")]
#[path = "limiter/world.rs"]
mod world;

use std::error::Error as _;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};
use zae_limiter::store::StoreErrorKind;
use zae_limiter::{Error, OnUnavailable};
use zae_limiter_testkit::Fault;

use world::{child, drive, on_every_store, own_limits, per_minute, secs, settle_down};

/// Part of every id that the test uses.
const SECRET: &str = "s3cr3t";

/// All that was logged, by all threads.
static LOG: LazyLock<Mutex<String>> = LazyLock::new(Mutex::default);

struct Everything(AtomicU64);

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}

impl Subscriber for Everything {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("zae_limiter")
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        attributes.record(&mut Fields(&mut LOG.lock().unwrap()));
        span::Id::from_u64(self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &span::Id, values: &span::Record<'_>) {
        values.record(&mut Fields(&mut LOG.lock().unwrap()));
    }

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut log = LOG.lock().unwrap();
        event.record(&mut Fields(&mut log));
        log.push('\n');
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The error's text, its debug form, and those of what caused it.
fn texts(error: &Error) -> String {
    let mut all = format!("{error}\n{error:?}\n");
    let mut cause = error.source();
    while let Some(inner) = cause {
        let _ = writeln!(all, "{inner}\n{inner:?}");
        cause = inner.source();
    }
    all
}

#[test]
fn no_entity_id_is_in_a_log_line_or_an_error() {
    tracing::subscriber::set_global_default(Everything(AtomicU64::new(0))).unwrap();
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        let key = format!("key-{SECRET}");
        let org = format!("org-{SECRET}");
        let mut errors = Vec::new();
        let mut failed = |done: Result<(), Error>| errors.push(done.expect_err("it must fail"));
        failed(limiter.create_entity(&key).parent(&org).await.map(drop));
        failed(limiter.create_entity(&key).parent(&key).await.map(drop));
        failed(limiter.delete_entity(&key).await.map(drop));
        failed(limiter.delete_limits(&key, None).await);
        failed(limiter.delete_limits(&key, Some("gpt-4")).await);
        limiter.create_entity(&org).await.unwrap();
        child(&limiter, &key, &org).await;
        failed(limiter.create_entity(&key).await.map(drop));
        failed(limiter.ensure_entity(&org).parent(&key).await.map(drop));
        let mut deepest = key.clone();
        for level in 0..9 {
            let below = format!("{level}-{SECRET}");
            match limiter.create_entity(&below).parent(&deepest).cascade().await {
                Ok(_) => deepest = below,
                Err(error) => failed(Err(error)),
            }
        }
        own_limits(&limiter, &org, [per_minute("rpm", 5)]).await;
        let call = |tokens| limiter.acquire(&key, "gpt-4").take("rpm", tokens);
        failed(limiter.acquire(&key, "gpt-4").take("x", 1).await.map(drop));
        failed(call(11).await.map(drop));
        failed(call(6).await.map(drop));
        call(5).await.unwrap().commit().await.unwrap();
        failed(call(1).await.map(drop));
        failed(call(1).wait_up_to(secs(0)).await.map(drop));
        failed(limiter.acquire(&format!("{SECRET} key"), "gpt-4").take("rpm", 1).await.map(drop));
        failed(limiter.acquire(&format!("a b {SECRET}"), "gpt-4").take("rpm", 1).await.map(drop));
        drop(limiter.acquire(&org, "gpt-5").take("rpm", 1).await.unwrap());
        for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Busy, StoreErrorKind::Corrupt] {
            world.store.break_down(Fault::FailBefore(kind));
            let (done, _) = drive(&world, call(1).into_future()).await;
            failed(done.map(drop));
            let passes = call(1).on_unavailable(OnUnavailable::Allow);
            let _ = drive(&world, passes.into_future()).await;
            world.store.heal();
        }
        settle_down().await;
        for error in &errors {
            // The first characters of an invalid id are shown on purpose.
            let shown = texts(error).replace(&format!("\"{SECRET}…\""), "");
            assert!(!shown.contains(SECRET), "{shown}");
        }
        assert!(errors.len() > 18, "{}", errors.len());
    });
    let log = LOG.lock().unwrap();
    let leak = log.lines().find(|line| line.contains(SECRET));
    assert_eq!(leak, None);
    assert!(log.lines().count() > 20, "hardly anything was logged: {log}");
}
