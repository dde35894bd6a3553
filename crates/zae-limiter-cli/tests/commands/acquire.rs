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

/// The bucket earns nothing in a minute that comes twice, so the token would come after two minutes.
#[test]
fn a_wait_ends_in_time_although_the_clock_is_set_back() {
    let mut session = Session::new();
    session.run("acquire key-1 gpt-4 -c rpm:1 -l rpm:1");
    session.set_back = Duration::from_secs(60);
    let line = "acquire key-1 gpt-4 -c rpm:1 -l rpm:1 --wait 90s";
    let (status, stdout, stderr) = session.run_unseen(line, usize::MAX);
    assert_eq!(status, 5, "{stdout}{stderr}");
    assert_eq!(session.run("acquire key-1 gpt-4 -c rpm:1 -l rpm:1 --wait 1s"), 5);
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

/// A hint that suggested `set-defaults` with the misspelt name would drop the limits that hold.
#[test]
fn a_misspelt_limit_is_met_with_those_that_hold() {
    let mut session = Session::new();
    session.run_unseen("resource set-defaults gpt-4 -l tpm:1000 -l rpm:100", usize::MAX);
    for line in [
        "acquire key-1 gpt-4 -c rmp:1",
        "available key-1 gpt-4 -c rmp:1",
        "resource capacity gpt-4 rmp",
        "bench --entity key-1 --resource gpt-4 --each 1 -c rmp:1",
        "bench --store memory: --each 1 -l rpm:10 -l tpm:10 -c rmp:1",
        "acquire key-1 gpt-4 -c rpm:1 -c tpm:1 --adjust rmp:1",
    ] {
        let (status, _, stderr) = session.run_unseen(line, usize::MAX);
        assert!(status == 1 || status == 2, "{line}: {status}");
        assert!(stderr.contains("did you mean rpm?"), "{line}: {stderr}");
        assert!(stderr.contains("rpm, tpm"), "{line}: {stderr}");
        assert!(!stderr.contains("set-defaults"), "{line}: {stderr}");
        assert!(!stderr.contains("-l rmp"), "{line}: {stderr}");
    }
    // Nothing like it: all that hold, and no guess.
    let (_, _, stderr) = session.run_unseen("acquire key-1 gpt-4 -c uploads:1", usize::MAX);
    assert!(stderr.contains("rpm, tpm") && !stderr.contains("did you mean"), "{stderr}");
    // Only where no limits hold may the hint set some.
    let (_, _, stderr) = session.run_unseen("acquire key-1 claude-3 -c rpm:1", usize::MAX);
    assert!(stderr.contains("resource set-defaults claude-3 -l rpm:100"), "{stderr}");
}

#[test]
fn adjustments_count_together() {
    let mut session = Session::new();
    let call = "acquire key-1 gpt-4 -c tpm:500 -l tpm:1000";
    let line = format!("{call} --adjust tpm:-600 --adjust tpm:100 -o json");
    let (status, stdout, stderr) = session.run_unseen(&line, usize::MAX);
    assert_eq!((status, stderr.as_str()), (0, ""));
    assert!(stdout.contains("\"available\": 1000"), "{stdout}");
    let too_much = format!("{call} --adjust tpm:-600 --adjust tpm:99");
    let (status, _, stderr) = session.run_unseen(&too_much, usize::MAX);
    assert_eq!(status, 2, "{stderr}");
    assert!(stderr.contains("use tpm:-500 at most"), "{stderr}");
}

#[test]
fn a_hint_names_no_negative_zero() {
    let mut session = Session::new();
    let line = "acquire key-1 gpt-4 -c rpm:0 -l rpm:10 --adjust rpm:-1";
    let (status, _, stderr) = session.run_unseen(line, usize::MAX);
    assert_eq!(status, 2);
    assert!(!stderr.contains("-0"), "{stderr}");
    assert!(stderr.contains("no tokens of rpm are taken"), "{stderr}");
}

#[test]
fn a_misspelt_resource_is_met_with_the_one_that_was_meant() {
    let mut session = Session::new();
    session.run_unseen("resource set-defaults gpt-4 -l rpm:100", usize::MAX);
    for line in
        ["acquire key-1 gpt4 -c rpm:1", "available key-1 gpt4 -c rpm:1", "available key-1 gpt4"]
    {
        let (_, _, stderr) = session.run_unseen(line, usize::MAX);
        assert!(stderr.contains("did you mean gpt-4?"), "{line}: {stderr}");
    }
    let (_, _, stderr) = session.run_unseen("acquire key-1 uploads -c rpm:1", usize::MAX);
    assert!(!stderr.contains("did you mean"), "{stderr}");
}
