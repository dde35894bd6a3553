//! Leases that nobody settles are warned of. A process of its own: it listens to all that is logged.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[expect(dead_code, reason = "shared with the other tests, which use all of it")]
#[path = "limiter/world.rs"]
mod world;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};
use zae_limiter::OnDrop;

use world::{Kind, without_refill};

/// Counts warnings about leases, by their message.
#[derive(Default)]
struct Warnings {
    seen: Mutex<Vec<String>>,
    spans: AtomicUsize,
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed) as u64 + 1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Fields(String);

        impl Visit for Fields {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }

        let mut fields = Fields(String::new());
        event.record(&mut fields);
        self.seen.lock().unwrap().push(fields.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_lease_that_nobody_settles_is_warned_of_once_per_call_site() {
    let warnings = Arc::new(Warnings::default());
    tracing::subscriber::set_global_default(Arc::clone(&warnings)).unwrap();
    world::on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 1_000)]).await;
        for _ in 0..5 {
            drop(limiter.acquire("sk-secret", "gpt-4").take("tpm", 1).await.unwrap());
        }
        drop(limiter.acquire("sk-secret", "gpt-4").take("tpm", 1).await.unwrap());
        // Settled, kept, committed or rolled back: nothing is left to guess.
        let mut settled = limiter.acquire("sk-secret", "gpt-4").take("tpm", 1).await.unwrap();
        settled.settle("tpm", 1).unwrap();
        drop(settled);
        let kept = limiter.acquire("sk-secret", "gpt-4").take("tpm", 1).on_drop(OnDrop::Keep);
        drop(kept.await.unwrap());
        limiter.acquire("sk-secret", "gpt-4").take("tpm", 1).await.unwrap().commit().await.unwrap();
        limiter
            .acquire("sk-secret", "gpt-4")
            .take("tpm", 1)
            .await
            .unwrap()
            .rollback()
            .await
            .unwrap();
    });
    let seen = warnings.seen.lock().unwrap();
    let about_leases: Vec<&String> = seen.iter().filter(|text| text.contains("lease")).collect();
    assert_eq!(about_leases.len(), 2, "{seen:?}");
    assert!(about_leases.iter().all(|text| text.contains("warnings.rs:")), "{seen:?}");
    assert!(seen.iter().all(|text| !text.contains("secret")), "{seen:?}");
}
