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
