//! Entities, stored limits, audit events, namespaces.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use zae_limiter_core::{
    AuditAction, AuditSubject, Clock as _, ConfigLevel, Limit, LimitSet, NamespaceId,
    OnUnavailable, ResourceList,
};

use crate::both::{Both, json_of, limits_json, rpm};

pub(crate) async fn entities_and_children(both: Both) {
    let ours = &both.ours;
    ours.create_entity("team").name("The team").metadata("tier", "gold").await.unwrap();
    ours.create_entity("of-ours").parent("team").cascade().await.unwrap();
    ours.create_entity("loose").parent("team").await.unwrap();
    let more = json!({"entity": "of-python", "parent": "team", "cascade": true,
        "name": "Another", "metadata": {"a.b": "c"}});
    both.python("create_entity", more);

    let entity = |id: &str| both.python("entity", json!({"entity": id}));
    assert_eq!(entity("team"), json!(["The team", null, false, {"tier": "gold"}]));
    assert_eq!(entity("of-ours"), json!([null, "team", true, {}]));
    assert_eq!(entity("loose"), json!([null, "team", false, {}]));
    assert_eq!(entity("nobody"), Value::Null);
    let found = ours.entity("of-python").await.unwrap().unwrap();
    assert_eq!(found.name.as_deref(), Some("Another"));
    assert_eq!(found.parent.as_ref().map(|id| id.as_str()), Some("team"));
    assert!(found.cascade);
    assert_eq!(found.metadata, BTreeMap::from([("a.b".to_owned(), "c".to_owned())]));

    let children = json!(["loose", "of-ours", "of-python"]);
    assert_eq!(both.python("children", json!({"entity": "team"})), children);
    let listed = ours.children("team").unwrap().all().await.unwrap();
    let listed: Value = listed.iter().map(|child| child.id.as_str()).collect();
    assert_eq!(listed, children);

    // What one deletes is gone for the other, with its buckets and limits.
    for entity in ["of-ours", "of-python"] {
        ours.set_limits(entity, Some("gpt-4"), [rpm(10, 10)]).await.unwrap();
        assert!(both.take(entity, 1).await || entity == "of-python");
    }
    both.python("delete_entity", json!({"entity": "of-ours"}));
    ours.delete_entity("of-python").await.unwrap();
    for id in ["of-ours", "of-python"] {
        assert!(ours.entity(id).await.unwrap().is_none());
        assert_eq!(entity(id), Value::Null);
        assert!(both.item(id).await.is_empty());
        assert!(ours.limits(id, Some("gpt-4")).await.unwrap().is_none());
    }
}

/// What holds for an entity, by both.
async fn effective(both: &Both, entity: &str) -> (ConfigLevel, i64) {
    let effective = both.ours.effective_limits(entity, "gpt-4").await.unwrap();
    let limits = LimitSet::new(effective.limits).unwrap();
    let capacity = limits.rates()[0].capacity().get() / 1_000;
    // A bucket that does not exist is full, by the limits that hold.
    assert_eq!(both.available(entity).await, capacity, "of {entity}");
    (effective.level.unwrap(), capacity)
}

pub(crate) async fn limits_that_we_set(both: Both) {
    let ours = &both.ours;
    let daily = Limit::per_day("tpd", 5_000);
    ours.set_system_defaults([rpm(1, 1), daily.clone()], Some(OnUnavailable::Allow)).await.unwrap();
    let system = both.python("system", json!({}));
    assert_eq!(system, json!([json_of([rpm(1, 1), daily.clone()]), "allow"]));
    assert_eq!(effective(&both, "e").await, (ConfigLevel::System, 1));

    ours.set_resource_defaults("gpt-4", [rpm(2, 1)]).await.unwrap();
    assert_eq!(both.python("resource", json!({"resource": "gpt-4"})), json_of([rpm(2, 1)]));
    assert_eq!(effective(&both, "e").await.1, 2);

    ours.set_limits("e", None, [rpm(3, 1)]).await.unwrap();
    assert_eq!(both.python("limits", json!({"entity": "e"})), json_of([rpm(3, 1)]));
    assert_eq!(effective(&both, "e").await.1, 3);

    ours.set_limits("e", Some("gpt-4"), [rpm(9, 1), daily]).await.unwrap();
    // Set again, with less: nothing of the first may be left.
    ours.set_limits("e", Some("gpt-4"), [rpm(4, 2)]).await.unwrap();
    let on_resource = json!({"entity": "e", "resource": "gpt-4"});
    assert_eq!(both.python("limits", on_resource.clone()), json_of([rpm(4, 2)]));
    assert_eq!(effective(&both, "e").await.1, 4);

    // Python counts the limits for all resources as a resource.
    assert_eq!(both.python("resources", json!({})), json!([["gpt-4"], ["_default_", "gpt-4"]]));
    for resource in ["gpt-4", "_default_"] {
        let entities = both.python("entities_with_limits", json!({"resource": resource}));
        assert_eq!(entities, json!(["e"]), "{resource}");
    }

    // Enforced: exactly 4, whichever client asks.
    assert!(both.python_takes("e", 4));
    assert!(!both.python_takes("e", 1));
    assert!(!both.take("e", 1).await);

    // Python deletes what we have set, from the top down.
    both.python("delete_limits", on_resource.clone());
    assert!(ours.limits("e", Some("gpt-4")).await.unwrap().is_none());
    assert_eq!(ours.effective_limits("e", "gpt-4").await.unwrap().level, Some(level("e")));
    both.python("delete_limits", json!({"entity": "e"}));
    assert!(ours.limits("e", None).await.unwrap().is_none());
    assert_eq!(both.python("resources", json!({})), json!([["gpt-4"], []]));
    assert!(ours.resources(ResourceList::WithEntityConfigs).all().await.unwrap().is_empty());
    both.python("delete_resource", json!({"resource": "gpt-4"}));
    assert!(ours.resource_defaults("gpt-4").await.unwrap().is_none());
    assert!(ours.resources(ResourceList::WithDefaults).all().await.unwrap().is_empty());
    both.python("delete_system", json!({}));
    let left = ours.system_defaults().await.unwrap();
    assert!(left.is_none_or(|config| config.limits.is_empty()), "nothing is left");
}

fn level(entity: &str) -> ConfigLevel {
    ConfigLevel::Entity(entity.parse().unwrap())
}

pub(crate) async fn limits_that_python_sets(both: Both) {
    let ours = &both.ours;
    let more = json!({"limits_": json_of([rpm(1, 1)]), "on_unavailable": "block"});
    both.python("set_system", more);
    let system = ours.system_defaults().await.unwrap().unwrap();
    assert_eq!(limits_json(&system.limits), json_of([rpm(1, 1)]));
    assert_eq!(system.on_unavailable, Some(OnUnavailable::Block));
    assert_eq!(effective(&both, "e").await, (ConfigLevel::System, 1));

    both.python("set_resource", json!({"resource": "gpt-4", "limits_": json_of([rpm(2, 1)])}));
    let found = ours.resource_defaults("gpt-4").await.unwrap().unwrap();
    assert_eq!(limits_json(&found.limits), json_of([rpm(2, 1)]));
    assert_eq!(effective(&both, "e").await.1, 2);

    both.python("set_limits", json!({"entity": "e", "limits_": json_of([rpm(3, 1)])}));
    let found = ours.limits("e", None).await.unwrap().unwrap();
    assert_eq!(limits_json(&found.limits), json_of([rpm(3, 1)]));
    assert_eq!(effective(&both, "e").await, (level("e"), 3));

    let set = |limits: Value| json!({"entity": "e", "resource": "gpt-4", "limits_": limits});
    both.python("set_limits", set(json_of([rpm(9, 1), Limit::per_day("tpd", 5)])));
    both.python("set_limits", set(json_of([rpm(4, 2)])));
    let found = ours.limits("e", Some("gpt-4")).await.unwrap().unwrap();
    assert_eq!(limits_json(&found.limits), json_of([rpm(4, 2)]));
    assert_eq!(effective(&both, "e").await.1, 4);

    // We change what Python has set, and Python what we have.
    ours.set_limits("e", Some("gpt-4"), [rpm(5, 5)]).await.unwrap();
    assert_eq!(effective(&both, "e").await.1, 5);
    both.python("set_limits", set(json_of([rpm(6, 6)])));
    assert_eq!(effective(&both, "e").await.1, 6);

    let with = ours.resources(ResourceList::WithEntityConfigs).all().await.unwrap();
    assert_eq!(with.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["gpt-4"]);
    let with = ours.resources(ResourceList::WithDefaults).all().await.unwrap();
    assert_eq!(with.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["gpt-4"]);
    for resource in [Some("gpt-4"), None] {
        let entities = ours.entities_with_limits(resource).unwrap().all().await.unwrap();
        assert_eq!(entities.len(), 1, "{resource:?}");
    }

    // Enforced.
    assert!(both.take("e", 6).await);
    assert!(!both.take("e", 1).await);
    assert!(!both.python_takes("e", 1));

    // We delete what Python has set.
    ours.delete_limits("e", Some("gpt-4")).await.unwrap();
    let on_resource = json!({"entity": "e", "resource": "gpt-4"});
    assert_eq!(both.python("limits", on_resource), json!([]));
    ours.delete_limits("e", None).await.unwrap();
    assert_eq!(both.python("limits", json!({"entity": "e"})), json!([]));
    assert_eq!(both.python("resources", json!({})), json!([["gpt-4"], []]));
    ours.delete_resource_defaults("gpt-4").await.unwrap();
    assert_eq!(both.python("resource", json!({"resource": "gpt-4"})), json!([]));
    assert_eq!(both.python("resources", json!({})), json!([[], []]));
    ours.delete_system_defaults().await.unwrap();
    assert_eq!(both.python("system", json!({}))[0], json!([]));
    assert_eq!(both.python("system", json!({}))[1], Value::Null);
}

pub(crate) async fn audit_events(both: Both) {
    let ours = &both.ours;
    ours.create_entity("a").metadata("k", "v").await.unwrap();
    both.python(
        "set_limits",
        json!({"entity": "a", "resource": "gpt-4", "limits_": json_of([rpm(5, 5)])}),
    );
    ours.set_system_defaults([rpm(1, 1)], None).await.unwrap();
    both.python("set_resource", json!({"resource": "gpt-4", "limits_": json_of([rpm(2, 2)])}));
    // ULIDs of one millisecond have no order among clients.
    both.pass(1);
    ours.delete_limits("a", Some("gpt-4")).await.unwrap();
    both.python("delete_system", json!({}));

    let by_python = both.python("audit", json!({"entity": "a"}));
    let mut seen: Vec<(&str, &str, Option<&str>)> = by_python
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e[0].as_str().unwrap(), e[1].as_str().unwrap(), e[2].as_str()))
        .collect();
    seen.sort_unstable();
    let wanted = [
        ("entity_created", "rust", None),
        ("limits_deleted", "rust", Some("gpt-4")),
        ("limits_set", "python", Some("gpt-4")),
    ];
    assert_eq!(seen, wanted);

    let events = ours.audit_events("a").unwrap().all().await.unwrap();
    let mut seen: Vec<_> = events
        .iter()
        .map(|e| (e.action.as_str(), e.principal.as_deref().unwrap(), e.resource.as_ref()))
        .map(|(action, principal, resource)| (action, principal, resource.map(|r| r.as_str())))
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, wanted);
    let set = events.iter().find(|e| e.action == AuditAction::LimitsSet).unwrap();
    assert_eq!(set.details["limits"][0]["capacity"], 5);
    assert!(set.expires_at.is_some());

    // Python registers namespaces without a word, but reads what we say of it.
    let wanted = ["limits_deleted", "limits_set", "namespace_registered"];
    let system = both.python("audit", json!({"entity": "$SYSTEM"}));
    let mut seen: Vec<_> =
        system.as_array().unwrap().iter().map(|e| e[0].as_str().unwrap()).collect();
    seen.sort_unstable();
    assert_eq!(seen, wanted);
    let system = ours.audit_events_of(AuditSubject::System).all().await.unwrap();
    let mut seen: Vec<_> = system.iter().map(|e| e.action.as_str()).collect();
    seen.sort_unstable();
    assert_eq!(seen, wanted);
    let on = AuditSubject::Resource("gpt-4".parse().unwrap());
    let on = ours.audit_events_of(on).all().await.unwrap();
    assert_eq!(on.len(), 1);
    assert_eq!(on[0].principal.as_deref(), Some("python"));
}

/// For how many days the newest event of an entity is kept.
async fn days_kept(both: &Both, entity: &str) -> u64 {
    let events = both.ours.audit_events(entity).unwrap().all().await.unwrap();
    // Python's ends with a whole second.
    let kept = events[0].expires_at.unwrap().millis_since(both.clock.now());
    (kept + 43_200_000) / 86_400_000
}

/// Python looks for it where we do. What it writes there when it deploys goes into a namespace that nobody has,
/// so here it is set to write it into this one.
pub(crate) async fn audit_retention(both: Both) {
    let ours = &both.ours;
    ours.create_entity("before").await.unwrap();
    assert_eq!(days_kept(&both, "before").await, 90);
    both.python("set_retention", json!({"days": 30}));
    ours.create_entity("ours").await.unwrap();
    both.python("create_entity", json!({"entity": "python"}));
    assert_eq!((days_kept(&both, "ours").await, days_kept(&both, "python").await), (30, 30));

    // Defaults come and go beside it.
    ours.set_system_defaults([rpm(1, 1)], None).await.unwrap();
    ours.delete_system_defaults().await.unwrap();
    assert_eq!(both.python("system", json!({})), json!([[], null]));
    both.python("start_anew", json!({}));
    both.python("set_limits", json!({"entity": "python", "limits_": json_of([rpm(5, 5)])}));
    assert_eq!(days_kept(&both, "python").await, 30);

    ours.set_audit_retention(7).await.unwrap();
    both.python("start_anew", json!({}));
    both.pass(1);
    both.python("delete_limits", json!({"entity": "python"}));
    ours.set_limits("ours", None, [rpm(5, 5)]).await.unwrap();
    assert_eq!((days_kept(&both, "ours").await, days_kept(&both, "python").await), (7, 7));

    // Python replaces what is stored for the system, and with it this.
    both.python("set_system", json!({"limits_": json_of([rpm(1, 1)])}));
    both.pass(1);
    ours.delete_limits("ours", None).await.unwrap();
    assert_eq!(days_kept(&both, "ours").await, 90);
}

pub(crate) async fn namespaces(both: Both) {
    let namespaces = both.ours.namespaces();
    // Ours, used by Python.
    assert_eq!(both.python("namespace_id", json!({})), both.ours.namespace_id().as_str());
    let a = namespaces.register("of-ours").await.unwrap();
    assert_eq!(both.python("register", json!({"name": "of-ours"})), a.id.as_str());
    assert_eq!(both.python("namespaces", json!({}))["of-ours"], a.id.as_str());
    // Python's, used by us.
    let b = both.python("register", json!({"name": "of-python"}));
    let b = NamespaceId::new(b.as_str().unwrap()).unwrap();
    assert_eq!(namespaces.register("of-python").await.unwrap().id, b);
    let listed = namespaces.list().all().await.unwrap();
    for name in ["of-ours", "of-python"] {
        assert!(listed.iter().any(|namespace| namespace.name.as_str() == name), "{name}");
    }

    // One deletes, the other recovers.
    both.python("delete_namespace", json!({"name": "of-ours"}));
    assert!(namespaces.get("of-ours").await.unwrap().is_none());
    let orphans = namespaces.orphans().all().await.unwrap();
    assert!(orphans.iter().any(|namespace| namespace.id == a.id && namespace.deleted_at.is_some()));
    assert_eq!(namespaces.recover(&a.id).await.unwrap().name.as_str(), "of-ours");
    assert_eq!(both.python("namespaces", json!({}))["of-ours"], a.id.as_str());
    assert_eq!(both.python("orphans", json!({})).get("of-ours"), None);

    namespaces.delete("of-python").await.unwrap();
    assert_eq!(both.python("namespaces", json!({})).get("of-python"), None);
    assert_eq!(both.python("orphans", json!({}))["of-python"], b.as_str());
    assert_eq!(both.python("recover", json!({"id": b.as_str()})), "of-python");
    let found = namespaces.get("of-python").await.unwrap().unwrap();
    assert_eq!((found.id, found.deleted_at), (b, None));
}
