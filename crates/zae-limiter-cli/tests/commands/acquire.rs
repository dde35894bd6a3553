use std::time::Duration;

use crate::session::Session;

#[test]
fn taken_until_refused() {
    let mut session = Session::new();
    for _ in 0..2 {
        session.run("acquire key-1 gpt-4 -c rpm:1 -c tpm:500 -l rpm:10 -l tpm:900");
    }
    session.run("acquire key-1 gpt-4 -c rpm:1 -c tpm:500 -l rpm:10 -l tpm:900 -o json");
    session.advance(Duration::from_millis(6_667));
    session.run("acquire key-1 gpt-4 -c rpm:1 -c tpm:500 -l rpm:10 -l tpm:900 -o json");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn a_wait_that_is_short_enough_is_waited_for() {
    let mut session = Session::new();
    session.run("acquire key-1 gpt-4 -c rpm:5 -l rpm:6 -q");
    session.run("acquire key-1 gpt-4 -c rpm:5 -l rpm:6 --wait 39s");
    session.run("acquire key-1 gpt-4 -c rpm:5 -l rpm:6 --wait 40s");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn an_adjustment_may_leave_debt() {
    let mut session = Session::new();
    session.run("acquire key-1 gpt-4 -c tpm:500 -l tpm:1000 --adjust tpm:1500");
    session.run("acquire key-1 gpt-4 -c tpm:1 -l tpm:1000");
    session.run("acquire key-1 gpt-4 -c tpm:1 -l tpm:1000 --adjust rpm:1");
    session.run("acquire key-1 gpt-4 -c tpm:1 -l tpm:1000 --adjust tpm:-2");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_can_never_pass() {
    let mut session = Session::new();
    session.run("acquire key-1 gpt-4 -c tpm:1001 -l tpm:1000");
    session.run("acquire key-1 gpt-4 -c tpm:1 -l rpm:1000");
    session.run("acquire key-1 gpt-4 -c tpm:1 -o json");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn colours_on_a_terminal() {
    let mut session = Session::new().on_a_terminal("");
    session.run("acquire key-1 gpt-4 -c rpm:1 -l rpm:1");
    session.run("acquire key-1 gpt-4 -c rpm:1 -l rpm:1 --wait 1min");
    session.run("acquire key-1 gpt-4 -c rpm:1 -l rpm:1 --color never");
    session.env.insert("NO_COLOR".to_owned(), "1".to_owned());
    session.run("acquire key-1 gpt-4 -c rpm:1 -l rpm:1");
    insta::assert_snapshot!(session.transcript);
}
