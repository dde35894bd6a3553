use crate::session::Session;

#[test]
fn limits_for_everybody_on_everything() {
    let mut session = Session::new();
    for line in [
        "system get-defaults",
        "system get-defaults -o json",
        "system delete-defaults -y",
        "system set-defaults",
        "system set-defaults --on-unavailable maybe",
        "system set-defaults -l rpm:60 -l tpm:5000",
        "system get-defaults",
        "system set-defaults --on-unavailable allow",
        "system get-defaults",
        "system set-defaults -l rpm:70 -o json",
        "system get-defaults -o json",
        "system delete-defaults",
        "system delete-defaults -y",
        "system set-defaults --on-unavailable block",
        "system get-defaults",
        "system delete-defaults",
        "system delete-defaults -y -o json",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn a_person_is_asked() {
    let mut session = Session::new().on_a_terminal("no\n");
    session.env.insert("NO_COLOR".to_owned(), "1".to_owned());
    session.run("system set-defaults -l rpm:60 --on-unavailable allow");
    session.run("system delete-defaults");
    session.stdin = "y\n";
    session.run("system delete-defaults");
    insta::assert_snapshot!(session.transcript);
}
