use std::time::Duration;

use crate::session::Session;

const HOUR: Duration = Duration::from_secs(3_600);

/// Some usage: 14:25 on the 15th, two hours later, and two days later.
fn used() -> Session {
    let mut session = Session::new();
    session.run("resource set-defaults gpt-4 -l rpm:100 -l tpm:10000 -q");
    session.run("acquire key-1 gpt-4 -c rpm:1 -c tpm:500 --adjust tpm:230 -q");
    session.run("acquire key-2 gpt-4 -c rpm:1 -c tpm:50 -q");
    session.advance(2 * HOUR);
    session.run("acquire key-1 gpt-4 -c rpm:2 -c tpm:1000 -q");
    session.advance(46 * HOUR);
    session.run("acquire key-1 gpt-4 -c rpm:1 -c tpm:100 -q");
    session.run("acquire key-1 search -c calls:1 -l calls:5 -q");
    session.transcript.clear();
    session
}

#[test]
fn window_by_window() {
    let mut session = used();
    for line in [
        "usage list -e key-1",
        "usage list -e key-1 --start 7d",
        "usage list -e key-1 -w daily",
        "usage list -e key-1 -r gpt-4 -w monthly",
        "usage list -r gpt-4 --start 2026-11-15 --end 2026-11-15T16:00",
        "usage list -r gpt-4 --start 2026-11-15T16:59 --end 2026-11-15T17:00:00Z",
        "usage list -r gpt-4 --start 7d --end 1d -o json",
        "usage list -e key-3",
        "usage list -e key-3 -o json",
        "usage list -r gpt-4 --start 2026-01-01 --end 2026-02-01",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn drawn() {
    let mut session = used();
    for line in [
        "usage list -r gpt-4 --start 7d --plot",
        "usage list -e key-1 -w daily --plot",
        "usage list -e key-3 --plot",
        "usage list -e key-1 --plot -o json",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn added_up() {
    let mut session = used();
    for line in [
        "usage summary -e key-1",
        "usage summary -r gpt-4 --start 7d",
        "usage summary -e key-1 -r gpt-4 -w monthly",
        "usage summary -r gpt-4 -w daily -o json",
        "usage summary -e key-3 -r gpt-4",
        "usage summary -e key-3 -o json",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_cannot_be_asked() {
    let mut session = Session::new();
    for line in [
        "usage list",
        "usage summary -w daily",
        "usage list -e key-1 -w weekly",
        "usage list -e key-1 --start yesterday",
        "usage list -e key-1 --start 2026-11-15 --end 2026-11-15",
        "usage list -e key-1 --start 1h --end 2h -o json",
        "usage list -e key#1",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}
