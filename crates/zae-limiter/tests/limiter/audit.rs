//! Who changed what, and when.

use zae_limiter::model::{AuditAction, AuditEvent, AuditSubject};
use zae_limiter::testing::Clock as _;
use zae_limiter::{Error, OnUnavailable, RateLimiter};

use crate::world::{ms, on_every_store, per_minute, resource, secs};

async fn events(limiter: &RateLimiter, entity: &str) -> Vec<AuditEvent> {
    limiter.audit_events(entity).unwrap().all().await.unwrap()
}

/// Action, principal, resource and details of each event.
fn rows(events: &[AuditEvent]) -> Vec<(AuditAction, Option<&str>, Option<&str>, String)> {
    let one = |event: &AuditEvent| {
        let resource = event.resource.as_ref().map(|name| name.as_str().to_owned());
        (event.action.clone(), event.principal.clone(), resource, details(event))
    };
    let all: Vec<_> = events.iter().map(one).collect();
    // Leaked, so that the expected values can be written as text.
    all.into_iter()
        .map(|(action, principal, resource, details)| {
            (action, principal.map(leak), resource.map(leak), details)
        })
        .collect()
}

fn leak(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

fn details(event: &AuditEvent) -> String {
    let values = event.details.iter().map(|(name, value)| format!("{name}={value}"));
    values.collect::<Vec<_>>().join(" ")
}

#[test]
fn every_change_of_an_entity_is_recorded_newest_first() {
    on_every_store(async |world| {
        let limiter = world.builder().principal("alice").open().await.unwrap();
        let bob = limiter.acting_as("bob");
        limiter.create_entity("org").name("The Org").await.unwrap();
        let began = world.clock.now();
        world.advance(ms(1));
        bob.create_entity("key").parent("org").cascade().await.unwrap();
        world.advance(ms(1));
        limiter.set_limits("key", None, [per_minute("rpm", 5).burst(7)]).await.unwrap();
        world.advance(ms(1));
        bob.set_limits("key", Some("gpt-4"), [per_minute("rpm", 6)]).await.unwrap();
        world.advance(ms(1));
        limiter.delete_limits("key", Some("gpt-4")).await.unwrap();
        world.advance(ms(1));
        bob.delete_entity("key").await.unwrap();

        let found = events(&limiter, "key").await;
        let limit = |capacity: u64, amount: u64, version: u64| {
            format!(
                "config_version={version} limits=[{{\"capacity\":{capacity},\"name\":\"rpm\",\
                 \"refill_amount\":{amount},\"refill_period_seconds\":60}}] on_unavailable=null"
            )
        };
        let created = "cascade=true name=null parent_id=\"org\"".to_owned();
        assert_eq!(
            rows(&found),
            [
                (AuditAction::EntityDeleted, Some("bob"), None, "items=2".to_owned()),
                (AuditAction::LimitsDeleted, Some("alice"), Some("gpt-4"), String::new()),
                (AuditAction::LimitsSet, Some("bob"), Some("gpt-4"), limit(6, 6, 1)),
                (AuditAction::LimitsSet, Some("alice"), None, limit(7, 5, 1)),
                (AuditAction::EntityCreated, Some("bob"), None, created),
            ]
        );
        let times: Vec<i64> = found.iter().map(|e| e.at.as_millis() - began.as_millis()).collect();
        assert_eq!(times, [5, 4, 3, 2, 1]);
        let org = events(&limiter, "org").await;
        let created = "cascade=false name=\"The Org\" parent_id=null".to_owned();
        assert_eq!(rows(&org), [(AuditAction::EntityCreated, Some("alice"), None, created)]);
    });
}

#[test]
fn changes_of_defaults_are_recorded_for_the_system_and_the_resource() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        world.advance(ms(1));
        let policy = Some(OnUnavailable::Allow);
        limiter.set_system_defaults([per_minute("rpm", 1)], policy).await.unwrap();
        world.advance(ms(1));
        limiter.delete_system_defaults().await.unwrap();
        limiter.set_resource_defaults("gpt-4", [per_minute("rpm", 2)]).await.unwrap();
        world.advance(ms(1));
        limiter.set_resource_defaults("gpt-4", [per_minute("rpm", 3)]).await.unwrap();
        world.advance(ms(1));
        limiter.delete_resource_defaults("gpt-4").await.unwrap();

        let of = async |subject: AuditSubject| {
            let events = limiter.audit_events_of(subject.clone()).all().await.unwrap();
            assert!(events.iter().all(|event| event.subject == subject));
            events.iter().map(|event| (event.action.clone(), details(event))).collect::<Vec<_>>()
        };
        let system = of(AuditSubject::System).await;
        let actions: Vec<AuditAction> = system.iter().map(|(action, _)| action.clone()).collect();
        assert_eq!(
            actions,
            [AuditAction::LimitsDeleted, AuditAction::LimitsSet, AuditAction::NamespaceRegistered]
        );
        assert!(system[1].1.ends_with("on_unavailable=\"allow\""), "{}", system[1].1);
        assert_eq!(system[2].1, "namespace_name=\"default\"");
        let on_resource = of(AuditSubject::Resource(resource("gpt-4"))).await;
        let versions: Vec<&str> =
            on_resource.iter().map(|(_, details)| details.split(' ').next().unwrap()).collect();
        assert_eq!(versions, ["", "config_version=2", "config_version=1"]);
    });
}

#[test]
fn a_call_that_changes_nothing_records_nothing() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("key").await.unwrap();
        limiter.create_entity("key").await.unwrap_err();
        limiter.delete_limits("key", None).await.unwrap_err();
        limiter.set_limits("key", None, []).await.unwrap_err();
        limiter.create_entity("other").parent("nobody").await.unwrap_err();
        limiter.delete_entity("other").await.unwrap_err();
        assert_eq!(events(&limiter, "key").await.len(), 1);
        assert!(events(&limiter, "other").await.is_empty());
    });
}

#[test]
fn changes_within_one_millisecond_are_recorded_in_their_order() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        for capacity in 1..=50 {
            limiter.set_limits("key", None, [per_minute("rpm", capacity)]).await.unwrap();
        }
        let found = events(&limiter, "key").await;
        let versions: Vec<u64> =
            found.iter().map(|e| e.details["config_version"].as_u64().unwrap()).collect();
        assert_eq!(versions, (1..=50).rev().collect::<Vec<_>>());
    });
}

#[test]
fn events_expire_after_their_retention() {
    on_every_store(async |world| {
        let limiter = world.builder().audit_retention(secs(60)).open().await.unwrap();
        limiter.set_limits("key", None, [per_minute("rpm", 1)]).await.unwrap();
        world.advance(secs(60) - ms(1));
        assert_eq!(events(&limiter, "key").await.len(), 1);
        limiter.set_limits("key", None, [per_minute("rpm", 2)]).await.unwrap();
        world.advance(ms(1));
        let left = events(&limiter, "key").await;
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].details["config_version"], 2);
    });
}

const DAY: u64 = 86_400;

#[test]
fn events_are_kept_for_as_long_as_is_stored() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let registry = limiter.namespaces();
        registry.register("old").await.unwrap();
        limiter.set_limits("early", None, [per_minute("rpm", 1)]).await.unwrap();
        let mut progress = Vec::new();
        registry.set_audit_retention(30, |done| progress.push(done)).await.unwrap();
        assert_eq!(progress, [1, 2]);
        limiter.set_limits("key", None, [per_minute("rpm", 1)]).await.unwrap();
        limiter.create_entity("entity").await.unwrap();
        limiter.delete_limits("key", None).await.unwrap();
        limiter.set_resource_defaults("gpt-4", [per_minute("rpm", 1)]).await.unwrap();
        // Another program, that says so itself.
        let own = world.builder().audit_retention(secs(DAY)).open().await.unwrap();
        own.set_limits("own", None, [per_minute("rpm", 1)]).await.unwrap();
        // Other namespaces: one that was there, and one that comes later.
        registry.register("new").await.unwrap();
        for name in ["old", "new"] {
            let other = world.builder().namespace(name).open().await.unwrap();
            other.create_entity("elsewhere").await.unwrap();
            assert_eq!(days_kept(&other, "elsewhere").await, [30], "{name}");
            assert_eq!(kept(&other, AuditSubject::System).await.last(), Some(&expected(name)));
        }
        assert_eq!(days_kept(&limiter, "early").await, [90], "as it was to");
        assert_eq!(days_kept(&limiter, "key").await, [30, 30]);
        assert_eq!(days_kept(&limiter, "entity").await, [30]);
        assert_eq!(days_kept(&limiter, "own").await, [1]);
        let gpt = AuditSubject::Resource("gpt-4".parse().unwrap());
        assert_eq!(kept(&limiter, gpt).await, [30]);
    });
}

/// For how long the registration of a namespace is kept.
fn expected(name: &str) -> u64 {
    if name == "old" { 90 } else { 30 }
}

async fn kept(limiter: &RateLimiter, subject: AuditSubject) -> Vec<u64> {
    let events = limiter.audit_events_of(subject).all().await.unwrap();
    let days = |e: &AuditEvent| e.expires_at.unwrap().millis_since(e.at) / (DAY * 1_000);
    events.iter().map(days).collect()
}

async fn days_kept(limiter: &RateLimiter, entity: &str) -> Vec<u64> {
    kept(limiter, AuditSubject::Entity(entity.parse().unwrap())).await
}

#[test]
fn what_is_stored_for_the_system_leaves_the_retention_alone() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let registry = limiter.namespaces();
        registry.set_audit_retention(30, |_| {}).await.unwrap();
        // Nothing but that is stored: there are no defaults to delete.
        let stored = async || limiter.system_defaults().await.unwrap().unwrap();
        assert!(stored().await.sets_nothing());
        assert!(matches!(limiter.delete_system_defaults().await, Err(Error::NotFound { .. })));
        let one = [per_minute("rpm", 1)];
        limiter.set_system_defaults(one.clone(), Some(OnUnavailable::Allow)).await.unwrap();
        assert_eq!(stored().await.audit_retention_days, Some(30));
        limiter.delete_system_defaults().await.unwrap();
        let left = stored().await;
        assert!(left.sets_nothing());
        assert_eq!((left.audit_retention_days, left.version), (Some(30), 3));
        assert!(matches!(limiter.delete_system_defaults().await, Err(Error::NotFound { .. })));
        limiter.set_system_defaults(one, None).await.unwrap();
        registry.set_audit_retention(7, |_| {}).await.unwrap();
        let after = stored().await;
        assert_eq!((after.audit_retention_days, after.limits.len()), (Some(7), 1));
        // The same again writes nothing, and nonsense neither.
        registry.set_audit_retention(7, |_| {}).await.unwrap();
        for days in [0, 36_501] {
            let refused = registry.set_audit_retention(days, |_| {}).await;
            assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        }
        assert_eq!(stored().await, after);
    });
}
