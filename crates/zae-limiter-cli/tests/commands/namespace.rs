use std::collections::BTreeMap;
use std::time::Duration;

use zae_limiter::model::{EntityId, NamespaceId, ResourceName, Usage, UsageKey};
use zae_limiter::store::{Precondition, Record, Store as _, Write, Written};
use zae_limiter::{Timestamp, Window};

use crate::session::Session;

/// The id of a namespace that is registered.
fn id_of(session: &mut Session, name: &str) -> String {
    let (_, text, _) = session.run_unseen(&format!("namespace show {name}"), usize::MAX);
    let line = text.lines().find_map(|line| line.strip_prefix("ID "));
    line.unwrap().trim().to_owned()
}

#[test]
fn registered_deleted_recovered_and_purged() {
    let mut session = Session::new();
    for line in [
        "namespace list",
        "namespace register team-a team-b",
        "namespace register team-a",
        "namespace register team-c -o json",
        "namespace list",
        "namespace list -o json",
        "namespace show team-a",
        "namespace show team-a -o json",
        "namespace orphans",
        "namespace orphans -o json",
    ] {
        session.run(line);
    }
    let id = id_of(&mut session, "team-a");
    session.run("-N team-a resource set-defaults gpt-4 -l rpm:10 -q");
    session.run("-N team-a acquire key-1 gpt-4 -c rpm:1 -q");
    session.advance(Duration::from_secs(60));
    session.run("namespace delete team-a");
    session.run("namespace delete team-a --yes");
    session.run("namespace orphans");
    session.run("namespace orphans -o json");
    session.run("-N team-a available key-1 gpt-4");
    session.run(&format!("namespace recover {id}"));
    session.run("-N team-a available key-1 gpt-4");
    session.run("namespace delete team-a --yes -o json");
    session.run(&format!("namespace recover {id} -o json"));
    session.run(&format!("namespace purge {id} --yes"));
    session.run("namespace delete team-a --yes -q");
    session.run(&format!("namespace purge {id}"));
    session.run(&format!("namespace purge {id} --yes"));
    session.run(&format!("namespace purge {id} --yes"));
    session.run("namespace list");
    let id = id_of(&mut session, "team-b");
    session.run("namespace delete team-b --yes -q");
    session.run(&format!("namespace purge {id} --yes -o json"));
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_cannot_be_done() {
    let mut session = Session::new();
    session.run("namespace register team-a -q");
    let id = id_of(&mut session, "team-a");
    session.run("namespace delete team-a -y -q");
    session.run("namespace register team-a -q");
    for line in [
        "namespace register",
        "namespace register team/a",
        "namespace show team-z",
        "namespace show team-z -o json",
        "namespace delete team-z -y",
        "namespace delete default -y",
        "namespace recover team-a",
        "namespace recover 0123456789a",
        "namespace purge 0123456789a",
        &format!("namespace recover {id}"),
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn a_person_is_asked() {
    let mut session = Session::new().on_a_terminal("n\n");
    session.env.insert("NO_COLOR".to_owned(), "1".to_owned());
    session.run("namespace register team-a");
    let id = id_of(&mut session, "team-a");
    session.run("namespace delete team-a");
    session.stdin = "y\n";
    session.run("namespace delete team-a");
    session.stdin = "\n";
    session.run(&format!("namespace purge {id}"));
    session.stdin = "y\n";
    session.run(&format!("namespace purge {id}"));
    session.run("namespace orphans");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn namespaces_see_nothing_of_each_other() {
    let mut session = Session::new();
    session.run("namespace register team-a -q");
    session.env.insert("ZAEL_NAMESPACE".to_owned(), "team-a".to_owned());
    for line in [
        "entity create project-1 -q",
        "entity create key-1 --parent project-1 -q",
        "entity set-limits key-1 -r gpt-4 -l rpm:10 -q",
        "resource set-defaults gpt-4 -l rpm:20 -q",
        "system set-defaults -l rpm:30 -q",
        "acquire key-1 gpt-4 -c rpm:1 -q",
    ] {
        session.run(line);
    }
    session.transcript.clear();
    for line in [
        "entity show key-1",
        "entity get-limits key-1 -r gpt-4",
        "entity get-limits key-1 -r gpt-4 --effective",
        "entity list --with-custom-limits gpt-4",
        "entity list-resources",
        "entity children project-1",
        "resource get-defaults gpt-4",
        "resource list",
        "resource capacity gpt-4 rpm",
        "system get-defaults",
        "usage list -e key-1",
        "usage summary -e key-1",
        "audit list -e key-1",
        "audit list -r gpt-4",
    ] {
        session.run(line);
        session.run(&format!("{line} -N default"));
    }
    for line in [
        "entity delete key-1 --yes -N default",
        "entity delete-limits key-1 -r gpt-4 --yes -N default",
        "resource delete-defaults gpt-4 --yes -N default",
        "system delete-defaults --yes -N default",
        "entity set-limits key-1 -r gpt-4 -l rpm:1 -N default",
        "entity get-limits key-1 -r gpt-4",
        "entity show key-1 -N team-z",
        "usage summary -e key-1 -N team-z -o json",
        "entity create project-1 -N team-a --store memory:",
        "entity show key-1 -N default --store memory:",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn namespaces_of_killed_runs_are_shown_and_removed_after_a_day() {
    const DAY: Duration = Duration::from_secs(86_400);
    let mut session = Session::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let start = 1_794_752_736_000_i64;
    let url = format!("sqlite:{}", session.folder().join("data/limits.db").display());
    let names = [format!("bench-{start}-17"), format!("demo-{start}-18")];
    runtime.block_on(async {
        // What killed runs leave behind.
        let namespaces = session.limiter().await.namespaces();
        for (name, delete) in [
            (names[0].as_str(), false),
            (names[1].as_str(), true),
            // Made by hand: the name does not fit the time of its registration.
            ("bench-1234567890123-1", false),
            ("bench-mine", false),
        ] {
            namespaces.register(name).await.unwrap();
            if delete {
                namespaces.delete(name).await.unwrap();
            }
        }
    });
    session.run("namespace list");
    session.run("namespace list -o json");
    session.run("namespace orphans");
    session.advance(DAY - Duration::from_secs(1));
    let bench = format!("bench --store {url} --each 1 --concurrency 1 --entities 1 -q");
    assert_eq!(session.run_unseen(&bench, usize::MAX).0, 0);
    session.run("namespace list");
    session.advance(Duration::from_secs(2));
    let (status, _, stderr) = session.run_unseen(&bench, usize::MAX);
    assert_eq!((status, stderr.as_str()), (0, ""));
    session.run("namespace list");
    session.run("namespace orphans");
    insta::assert_snapshot!(session.transcript);
    assert!(!session.transcript.rsplit("(2 s later)").next().unwrap().contains(&names[0]));
}

/// Writes a usage record to the session's store, as if a program had not noticed that the namespace is gone.
fn leave_behind(session: &Session, id: &str, entity: &str) {
    let usage = Usage {
        key: UsageKey {
            namespace: NamespaceId::new(id).unwrap(),
            entity: EntityId::new(entity).unwrap(),
            resource: ResourceName::new("gpt-4").unwrap(),
            window: Window::Daily,
            start: Timestamp::from_millis(1_794_700_800_000),
        },
        consumed: BTreeMap::new(),
        events: 1,
        expires_at: None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store =
            zae_limiter::SqliteStore::open(session.folder().join("data/limits.db")).unwrap();
        let batch = [Write::Put(Record::Usage(usage), Precondition::Always)];
        assert_eq!(store.write(&batch).await.unwrap(), Written::Done);
    });
}

#[test]
fn what_no_other_command_finds_is_swept() {
    let mut session = Session::new();
    session.run("namespace register team-a -q");
    session.run("resource set-defaults gpt-4 -l rpm:10 -q");
    session.run("acquire key-1 gpt-4 -c rpm:1 -q");
    session.run("sweep");
    session.run("sweep --dry-run -o json");
    leave_behind(&session, "AAAAAAAAAAA", "key-1");
    leave_behind(&session, "AAAAAAAAAAA", "key-2");
    leave_behind(&session, "BBBBBBBBBBB", "key-1");
    for line in [
        "sweep --dry-run",
        "sweep --dry-run -o json",
        "sweep --dry-run --yes",
        "sweep",
        "sweep --yes",
        "sweep --yes",
        "sweep --yes -o json",
        "available key-1 gpt-4",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}
