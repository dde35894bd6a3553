use std::time::Duration;

use crate::session::Session;

#[test]
fn limits_for_everybody() {
    let mut session = Session::new();
    for line in [
        "resource list",
        "resource list -o json",
        "resource get-defaults gpt-4",
        "resource get-defaults gpt-4 -o json",
        "resource set-defaults gpt-4 -l rpm:100 -l tpm:10000/min:15000",
        "resource set-defaults claude-3 -l rpm:50/hour -o json",
        "resource get-defaults gpt-4",
        "resource get-defaults gpt-4 -o json",
        "resource list",
        "resource list -o json",
        "resource delete-defaults gpt-4",
        "resource delete-defaults gpt-4 -y",
        "resource delete-defaults gpt-4 -y",
        "resource delete-defaults claude-3 -y -o json",
        "resource set-defaults _default_ -l rpm:1",
        "resource set-defaults gpt-4",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn a_person_is_asked() {
    let mut session = Session::new().on_a_terminal("N\n");
    session.env.insert("NO_COLOR".to_owned(), "1".to_owned());
    session.run("resource set-defaults gpt-4 -l rpm:100");
    session.run("resource delete-defaults gpt-4");
    session.stdin = "y\n";
    session.run("resource delete-defaults gpt-4");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_is_left() {
    let mut session = Session::new();
    for line in [
        "resource capacity gpt-4 tpm",
        "resource capacity gpt-4 tpm -o json",
        "resource set-defaults gpt-4 -l tpm:1000 -q",
        "acquire key-1 gpt-4 -c tpm:250 -q",
        "resource capacity gpt-4 tpm",
        "acquire key-2 gpt-4 -c tpm:1000 --adjust tpm:500 -q",
        "acquire key-3 gpt-4 -c rpm:1 -l rpm:10 -q",
        "resource capacity gpt-4 tpm",
        "resource capacity gpt-4 tpm -o json",
        "resource capacity gpt-4 uploads",
        "resource capacity gpt-4",
        "resource capacity gpt-4 t#m",
    ] {
        session.run(line);
    }
    session.advance(Duration::from_secs(30));
    session.run("resource capacity gpt-4 tpm");
    insta::assert_snapshot!(session.transcript);
}

/// Runs a command line that must succeed, and returns stdout and stderr.
fn succeeds(session: &mut Session, line: &str) -> (String, String) {
    let (status, stdout, stderr) = session.run_unseen(line, usize::MAX);
    assert_eq!(status, 0, "{line}: {stderr}");
    (stdout, stderr)
}

#[test]
fn the_capacity_is_that_of_the_limits_that_hold_now() {
    let mut session = Session::new();
    succeeds(&mut session, "resource set-defaults gpt-4 -l tpm:1000 -l rpm:10 -q");
    succeeds(&mut session, "acquire key-1 gpt-4 -c tpm:250 -q");
    succeeds(&mut session, "resource set-defaults gpt-4 -l tpm:500 -q");
    let (stdout, _) = succeeds(&mut session, "resource capacity gpt-4 tpm -o json");
    let document: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(document["entities"][0]["capacity"], 500);
    assert_eq!(document["entities"][0]["available"], 500);
    // No longer a limit of anybody.
    let (status, stdout, stderr) = session.run_unseen("resource capacity gpt-4 rpm", usize::MAX);
    assert_eq!((status, stdout.as_str()), (1, ""), "{stderr}");
    assert!(stderr.contains("limits that hold: tpm"), "{stderr}");
}

#[test]
fn the_total_counts_the_tokens_of_a_parent_once() {
    let mut session = Session::new();
    for line in [
        "resource set-defaults gpt-4 -l tpm:1000",
        "entity create acme",
        "entity create team --parent acme --cascade",
        "entity create key-1 --parent team --cascade",
        "entity create key-2 --parent team --cascade",
        "entity set-limits acme -l tpm:1500",
        // No tpm: its keys draw from acme all the same.
        "entity set-limits team -l rpm:10",
        "acquire key-1 gpt-4 -c tpm:100",
        "acquire key-2 gpt-4 -c tpm:200",
        "acquire alone gpt-4 -c tpm:400",
    ] {
        succeeds(&mut session, &format!("{line} -q"));
    }
    let (stdout, _) = succeeds(&mut session, "resource capacity gpt-4 tpm -o json");
    let document: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(document["entities"].as_array().unwrap().len(), 4);
    assert_eq!(document["total_capacity"], 2500);
    assert_eq!(document["total_available"], 1800);
    let within: Vec<&serde_json::Value> =
        document["entities"].as_array().unwrap().iter().map(|entity| &entity["within"]).collect();
    assert_eq!(
        within,
        ["null", "null", "\"acme\"", "\"acme\""]
            .map(|text| { serde_json::from_str::<serde_json::Value>(text).unwrap() })
            .iter()
            .collect::<Vec<_>>()
    );
    session.run("resource capacity gpt-4 tpm");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn limits_that_no_longer_hold_are_named() {
    let mut session = Session::new();
    for (first, second, dropped) in [
        (
            "resource set-defaults gpt-4 -l rpm:100 -l tpm:1000",
            "resource set-defaults gpt-4 -l tpm:900",
            "rpm:100/min",
        ),
        (
            "system set-defaults -l rpm:60 -l tpm:5000",
            "system set-defaults -l tpm:5000",
            "rpm:60/min",
        ),
        (
            "entity set-limits key-1 -l rpm:5 -l tpm:50",
            "entity set-limits key-1 -l tpm:50",
            "rpm:5/min",
        ),
        (
            "entity set-limits key-1 -r gpt-4 -l rpm:6 -l tpm:50",
            "entity set-limits key-1 -r gpt-4 -l tpm:50",
            "rpm:6/min",
        ),
    ] {
        succeeds(&mut session, &format!("{first} -q"));
        let (_, stderr) = succeeds(&mut session, second);
        assert!(
            stderr.contains("no longer hold") && stderr.contains(dropped),
            "{second}: {stderr}"
        );
        succeeds(&mut session, &format!("{first} -q"));
        let (stdout, stderr) = succeeds(&mut session, &format!("{second} -o json"));
        let document: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(document["dropped"][0]["name"], "rpm", "{second}");
        assert_eq!(stderr, "", "the document says it");
        // The same again drops nothing.
        let (stdout, _) = succeeds(&mut session, &format!("{second} -o json"));
        let document: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(document["dropped"].as_array().map(Vec::len), Some(0), "{second}");
        let (_, stderr) = succeeds(&mut session, second);
        assert!(!stderr.contains("no longer"), "{stderr}");
    }
}

#[test]
fn a_person_is_asked_before_limits_are_dropped() {
    let mut session = Session::new().on_a_terminal("n\n");
    session.env.insert("NO_COLOR".to_owned(), "1".to_owned());
    session.run("resource set-defaults gpt-4 -l rpm:100 -l tpm:1000");
    session.run("resource set-defaults gpt-4 -l tpm:900");
    session.run("resource get-defaults gpt-4");
    session.run("resource set-defaults gpt-4 -l tpm:900 --yes");
    session.stdin = "y\n";
    session.run("resource set-defaults gpt-4 -l rpm:1");
    session.run("system set-defaults -l rpm:60");
    session.run("system set-defaults --on-unavailable allow");
    session.run("entity set-limits key-1 -l tpm:5");
    session.run("entity set-limits key-1 -l rpm:6");
    session.run("resource get-defaults gpt-4");
    insta::assert_snapshot!(session.transcript);
}

/// A new level replaces those above it as a whole.
#[test]
fn limits_that_a_new_level_hides_are_named() {
    let mut session = Session::new();
    session.run("system set-defaults -l rpm:60 -l tpm:5000");
    session.run("resource set-defaults gpt-4 -l tpm:900");
    session.run("entity set-limits key-1 -r gpt-4 -l uploads:5");
    session.run("entity set-limits key-1 -r gpt-4 -l uploads:5 -l rpm:1 -o json");
    insta::assert_snapshot!(session.transcript);
}

/// Limits that a call brings along hold for that call only.
#[test]
fn a_resource_without_limits_has_no_capacity() {
    let mut session = Session::new();
    succeeds(&mut session, "acquire key-1 api -c calls:1 -l calls:4 -q");
    let (stdout, stderr) = succeeds(&mut session, "resource capacity api calls");
    assert_eq!(stdout, "");
    assert!(stderr.contains("no limits are stored for api"), "{stderr}");
    assert!(!stderr.contains("the first call creates it"), "{stderr}");
}

#[test]
fn ctrl_c_ends_a_command_that_waits_for_an_answer() {
    let mut session = Session::new();
    assert_eq!(session.run("resource set-defaults gpt-4 -l rpm:5 -l tpm:10"), 0);
    let mut session = session.on_a_terminal("");
    session.interrupt_at_prompt = true;
    for line in ["set-defaults gpt-4 -l rpm:6", "delete-defaults gpt-4"] {
        assert_eq!(session.run(&format!("resource {line}")), 130, "{}", session.transcript);
    }
    let (_, stdout, _) = session.run_unseen("resource get-defaults gpt-4 -o json", usize::MAX);
    assert!(stdout.contains("tpm"), "{stdout}");
}
