//! An audit event.

use zae_limiter_core::{
    AuditAction, AuditEvent, AuditSubject, DEFAULT_RESOURCE, Key, NamespaceId, ResourceName,
};

use super::reader::Reader;
use super::{json, moment, push_namespace, set, text_or_null};
use crate::expression::Action;
use crate::keys::ItemKey;
use crate::value::{Malformed, Value};

pub(super) fn encode(event: &AuditEvent) -> Vec<Action> {
    let mut actions = Vec::new();
    let AuditEvent { namespace, id, subject, .. } = event;
    set(&mut actions, "entity_id", Value::S(subject.to_string()));
    set(&mut actions, "event_id", Value::text(id));
    moment::push(&mut actions, "timestamp", event.at);
    set(&mut actions, "action", Value::text(event.action.as_str()));
    set(&mut actions, "principal", text_or_null(event.principal.as_deref()));
    let resource = event.resource.as_ref().map(ResourceName::as_str);
    set(&mut actions, "resource", text_or_null(resource));
    set(&mut actions, "details", Value::M(json::to_map(&event.details)));
    moment::push_ttl(&mut actions, event.expires_at);
    let key = ItemKey::of(&Key::Audit(namespace.clone(), subject.clone(), id.clone()));
    push_namespace(&mut actions, namespace, &key.pk);
    actions
}

pub(super) fn decode(
    ns: &NamespaceId,
    subject: &AuditSubject,
    id: &str,
    reader: &Reader<'_>,
) -> Result<AuditEvent, Malformed> {
    let resource = match reader.text_if_any("resource")? {
        // Other clients write it for limits on all resources.
        None | Some(DEFAULT_RESOURCE) => None,
        Some(_) => Some(reader.name("resource")?),
    };
    Ok(AuditEvent {
        namespace: ns.clone(),
        id: id.to_owned(),
        subject: subject.clone(),
        at: moment::read(reader, "timestamp")?,
        action: AuditAction::from_stored(reader.text("action")?),
        principal: reader.text_if_any("principal")?.map(str::to_owned),
        resource,
        details: reader.map("details")?.map(json::to_object).unwrap_or_default(),
        expires_at: moment::read_ttl(reader)?,
    })
}
