//! Entity ids are often API keys: they stand in no debug form, log line or error text.

use std::fmt::{Debug, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};
use zae_limiter::model::{AuditSubject, EntityId};
use zae_limiter::store::{BucketQuery, Cursor, PageRequest, Query, StoreErrorKind};
use zae_limiter::{Acquire, Error, Lease, OnUnavailable, Window};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    child, drive, entity_id, exceeded, finish, on_every_store, own_limits, per_minute, resource,
    secs, settle_down, spend,
};

const SECRET: &str = "s3cr3t";

/// Promise (`EntityId`): "Its `Debug` form is a short hash, because entity ids are often API keys."
#[test]
fn no_debug_form_of_a_public_type_shows_an_entity_id() {
    on_every_store(async |world| {
        let key = format!("key-{SECRET}");
        let org = format!("org-{SECRET}");
        let limiter = world.limiter().await;
        let mut shown: Vec<(&str, String)> = Vec::new();
        fn debug(shown: &mut Vec<(&'static str, String)>, what: &'static str, value: &dyn Debug) {
            shown.push((what, format!("{value:?} {value:#?}")));
        }
        debug(&mut shown, "Entity", &limiter.create_entity(&org).await.unwrap());
        debug(&mut shown, "Entity with parent", &child(&limiter, &key, &org).await);
        debug(&mut shown, "Config", &own_limits(&limiter, &key, [per_minute("rpm", 5)]).await);
        own_limits(&limiter, &org, [per_minute("rpm", 5)]).await;
        debug(&mut shown, "CreateEntity", &limiter.create_entity(&key).parent(&org));
        debug(&mut shown, "Acquire", &limiter.acquire(&key, "gpt-4").take("rpm", 1));
        debug(
            &mut shown,
            "Acquiring",
            &limiter.acquire(&key, "gpt-4").take("rpm", 1).into_future(),
        );
        debug(&mut shown, "UsageQuery", &limiter.usage().entity(&key));
        let lease = limiter.acquire(&key, "gpt-4").take("rpm", 2).await.unwrap();
        debug(&mut shown, "Lease", &lease);
        debug(&mut shown, "LimitStatus", &lease.statuses());
        lease.commit().await.unwrap();
        let refusal = exceeded(limiter.acquire(&key, "gpt-4").take("rpm", 4).await);
        debug(&mut shown, "RateLimitExceeded", &refusal);
        debug(&mut shown, "PublicRefusal", &refusal.public());
        debug(&mut shown, "RateLimiter", &limiter);
        debug(
            &mut shown,
            "EffectiveLimits",
            &limiter.effective_limits(&key, "gpt-4").await.unwrap(),
        );
        debug(&mut shown, "BucketStatus", &limiter.buckets(&key).unwrap().all().await.unwrap());
        let capacities = limiter.entity_capacities("gpt-4", "rpm").unwrap().all().await.unwrap();
        debug(&mut shown, "EntityCapacity", &capacities);
        debug(&mut shown, "AuditSubject", &AuditSubject::Entity(entity_id(&key)));
        let query = limiter.usage().entity(&key).window(Window::Daily).pages().unwrap();
        debug(&mut shown, "Pages", &query);
        debug(&mut shown, "Usage", &query.all().await.unwrap());
        debug(&mut shown, "EntityId", &EntityId::new(&key).unwrap());
        let leaks: Vec<_> =
            shown.iter().filter(|(_, text)| text.contains(SECRET)).map(|(what, _)| what).collect();
        assert!(leaks.is_empty(), "{leaks:?}");
    });
}

/// Promise (issue, 5): no entity id in any log line or error text; an audit event names the parent of an entity, and its
/// debug form is what a program logs.
#[test]
fn the_debug_form_of_an_audit_event_shows_no_entity_id() {
    on_every_store(async |world| {
        let key = format!("key-{SECRET}");
        let org = format!("org-{SECRET}");
        let limiter = world.limiter().await;
        limiter.create_entity(&org).await.unwrap();
        child(&limiter, &key, &org).await;
        let events = limiter.audit_events(&key).unwrap().all().await.unwrap();
        assert!(!format!("{events:?}").contains(SECRET), "{events:?}");
    });
}

/// Promise: a list that was read halfway, and the place where it stands, show no id.
#[test]
fn the_debug_form_of_a_list_read_halfway_shows_no_entity_id() {
    let shown = std::cell::RefCell::new(Vec::new());
    on_every_store(async |world| {
        let org = format!("org-{SECRET}");
        let limiter = world.limiter().await;
        limiter.create_entity(&org).await.unwrap();
        for at in 0..3 {
            child(&limiter, &format!("key-{at}-{SECRET}"), &org).await;
        }
        let mut pages = limiter.children(&org).unwrap().page_size(1);
        pages.next_page().await.unwrap();
        shown.borrow_mut().push(format!("{pages:?}"));
    });
    let shown = shown.into_inner();
    assert!(shown.iter().all(|text| !text.contains(SECRET)), "{shown:#?}");
}

/// Promise (issue, 5): no entity id in an error text: a place in a list that the store cannot read is an error.
#[test]
fn the_error_for_a_garbled_cursor_shows_no_entity_id() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        for at in 0..3 {
            let key = format!("key-{at}-{SECRET}");
            limiter.create_entity(&key).await.unwrap();
            spend(&limiter, &key, "gpt-4", "rpm", 1).await;
            spend(&limiter, &key, "gpt-5", "rpm", 1).await;
        }
        let namespace = limiter.namespace_id().clone();
        let on_resource = BucketQuery::OnResource(namespace.clone(), resource("gpt-4"));
        let first =
            world.store.inner().list_buckets(&on_resource, &PageRequest::first(1)).await.unwrap();
        let place = first.next.expect("there are more");
        let mut texts = Vec::new();
        let other_lists = [Query::Children(namespace, entity_id("org"))];
        let garbled = [
            place.clone(),
            Cursor::new(format!("key-0-{SECRET}")),
            Cursor::new(format!("{}#{SECRET}", place.as_str())),
        ];
        for cursor in garbled {
            let page = PageRequest { size: 1, after: Some(cursor) };
            for query in &other_lists {
                if let Err(error) = world.store.inner().list(query, &page).await {
                    texts.push(format!("{error} {error:?}"));
                }
            }
            if let Err(error) = world.store.inner().list_buckets(&on_resource, &page).await {
                texts.push(format!("{error} {error:?}"));
            }
        }
        let leaks: Vec<_> = texts.iter().filter(|text| text.contains(SECRET)).collect();
        assert!(leaks.is_empty(), "{leaks:#?}");
    });
}

/// All that was logged, by all tests of this program.
static LOG: LazyLock<Mutex<String>> = LazyLock::new(Mutex::default);

struct Everything(AtomicU64);

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
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
        event.record(&mut Fields(&mut LOG.lock().unwrap()));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Promise (issue, 5): no entity id in any log line: waiting, refused in the queue, dropped leases that cannot be
/// settled, degraded leases, changes, deletions.
#[test]
fn no_log_line_shows_an_entity_id() {
    tracing::subscriber::set_global_default(Everything(AtomicU64::new(0))).unwrap();
    on_every_store(async |world| {
        let key = format!("key-{SECRET}");
        let org = format!("org-{SECRET}");
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        limiter.ensure_entity(&org).await.unwrap();
        limiter.ensure_entity(&key).parent(&org).cascade().await.unwrap();
        limiter.ensure_limits(&key, Some("gpt-4"), [per_minute("rpm", 10)]).await.unwrap();
        spend(&limiter, &key, "gpt-4", "rpm", 10).await;
        let call = |tokens| limiter.acquire(&key, "gpt-4").take("rpm", tokens);
        if let Ok(done) = drive_some(call(5).wait_up_to(secs(1))).await {
            drop(done);
        }
        let lease = limiter.acquire(&key, "gpt-5").take("rpm", 1).await.unwrap();
        let mut other = limiter.acquire(&key, "gpt-5").take("rpm", 1).await.unwrap();
        other.adjust("rpm", 5).unwrap();
        for kind in [StoreErrorKind::Denied, StoreErrorKind::Corrupt] {
            world.store.script(Call::Settle, Fault::FailBefore(kind));
        }
        drop(lease);
        drop(other);
        settle_down().await;
        world.store.heal();
        world.store.break_down(Fault::FailAfter(StoreErrorKind::Unavailable));
        let allowed = call(1).on_unavailable(OnUnavailable::Allow).into_future();
        let (lease, _) = drive(&world, allowed).await;
        drop(lease);
        settle_down().await;
        world.store.heal();
        limiter.delete_limits(&key, Some("gpt-4")).await.unwrap();
        limiter.delete_entity(&key).await.unwrap();
        limiter.delete_entity(&org).await.unwrap();
    });
    let log = LOG.lock().unwrap();
    assert!(log.len() > 200, "too little was logged: {log}");
    if let Some(at) = log.find(SECRET) {
        panic!("{}", &log[at.saturating_sub(300)..(at + 100).min(log.len())]);
    }
}

async fn drive_some(call: Acquire<'_>) -> Result<Lease, Error> {
    finish(call.into_future()).await
}
