use std::time::Duration;

use zae_limiter::model::{AuditAction, AuditEvent, AuditSubject};
use zae_limiter::store::{Precondition, Record, Write};

use crate::session::Session;

#[test]
fn who_changed_what() {
    let mut session = Session::new();
    session.run("entity create project-1 -q");
    session.run("entity create key-1 --display-name 'The first' --parent project-1 -q");
    session.advance(Duration::from_secs(60));
    session.env.insert("ZAEL_PRINCIPAL".to_owned(), "deploy-bot".to_owned());
    session.run("entity set-limits key-1 -r gpt-4 -l rpm:100 -l tpm:10000/min:15000 -q");
    session.advance(Duration::from_secs(1));
    session.run("entity delete-limits key-1 -r gpt-4 -y -q");
    session.advance(Duration::from_secs(60));
    session.env.clear();
    session.run("entity delete key-1 -y -q");
    session.run("resource set-defaults gpt-4 -l rpm:5/hour -q");
    session.run("system set-defaults -l rpm:1 --on-unavailable allow -q");
    for line in [
        "audit list -e key-1",
        "audit list -e key-1 -o json",
        "audit list -r gpt-4",
        "audit list --system",
        "audit list --system -o json",
        "audit list -e key-2",
        "audit list -e key-2 -o json",
        "audit list -r claude-3",
        "audit list",
        "audit list -e key-1 --system",
        "audit list -e key#1",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn changes_by_other_clients_are_listed() {
    let mut session = Session::new();
    session.run("entity create key-1 -q");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let limiter = session.limiter().await;
        let actions =
            ["entity_parent_changed", "bucket_reset", "bucket_topped_up", "limits_frozen"];
        let put = |(number, action): (usize, &str)| {
            let event = AuditEvent {
                namespace: limiter.namespace_id().clone(),
                id: format!("7ZZZZZZZZZZZZZZZZZZZZZZZZ{number}"),
                subject: AuditSubject::Entity("key-1".parse().unwrap()),
                at: limiter.clock().now(),
                action: AuditAction::from_stored(action),
                principal: Some("python".to_owned()),
                resource: None,
                details: serde_json::Map::from_iter([("shards".to_owned(), number.into())]),
                expires_at: None,
            };
            Write::Put(Record::Audit(event), Precondition::Always)
        };
        let batch: Vec<Write> = actions.into_iter().enumerate().map(put).collect();
        limiter.store().write(&batch).await.unwrap();
    });
    session.run("audit list -e key-1");
    session.run("audit list -e key-1 -o json");
    insta::assert_snapshot!(session.transcript);
}
