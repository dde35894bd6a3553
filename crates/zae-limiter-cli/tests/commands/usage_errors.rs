use crate::session::Session;

#[test]
fn wrong_words() {
    let mut session = Session::new();
    for line in [
        "",
        "aquire key-1 gpt-4",
        "acquire key-1 gpt-4",
        "acquire key#1 gpt-4 -c rpm:1",
        "acquire key-1 gpt-4 -c rpm",
        "acquire key-1 gpt-4 -c rpm:1 -l rpm:ten",
        "acquire key-1 gpt-4 -c rpm:1 -l rpm:10/week",
        "acquire key-1 gpt-4 -c rpm:1 --wait 10",
        "acquire key-1 gpt-4 -c rpm:1 --wiat 10s",
        "available key-1 gpt-4 -o yaml",
        "available key#1 gpt-4 -o json",
        "available key-1 gpt-4 --store redis:localhost",
        "available key-1 gpt-4 -n my-stack --region eu-west-1 --endpoint-url http://127.0.0.1:1",
        "available key-1 gpt-4 -n my-stack --endpoint-url 127.0.0.1:1",
        "available key-1 gpt-4 -N nowhere",
        "available key-1 gpt-4 -N no/where",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn wrong_variables() {
    let mut session = Session::new();
    session.env.insert("ZAEL_STORE".to_owned(), "limits.db".to_owned());
    session.run("available key-1 gpt-4");
    session.env.insert("ZAEL_STORE".to_owned(), "memory:".to_owned());
    session.env.insert("ZAEL_NAMESPACE".to_owned(), "no/where".to_owned());
    session.run("available key-1 gpt-4");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn a_store_that_cannot_be_used() {
    let mut session = Session::new();
    let garbage = session.folder().join("garbage.db");
    std::fs::write(&garbage, "this is not a database, it is a letter to somebody").unwrap();
    session.run(&format!("available key-1 gpt-4 --store sqlite:{}", garbage.display()));
    let missing = session.folder().join("missing/limits.db");
    session.run(&format!("available key-1 gpt-4 --store sqlite:{}", missing.display()));
    session.run(&format!("available key-1 gpt-4 --store sqlite:{} -o json", missing.display()));
    // The folder differs in length from run to run, and so would the marker under it.
    let transcript = session.transcript.replace(&*session.folder().to_string_lossy(), "FOLDER");
    insta::assert_snapshot!(transcript);
}

#[test]
fn two_slashes_are_not_the_root_of_the_file_system() {
    let mut session = Session::new();
    for url in ["sqlite://x.db", "sqlite://", "sqlite:///", "sqlite://a/b.db"] {
        session.run(&format!("resource list --store {url}"));
    }
    let file = session.folder().join("50%.db");
    let (status, ..) = session
        .run_unseen(&format!("resource list --store sqlite://{}", file.display()), usize::MAX);
    assert_eq!(status, 0);
    assert!(file.exists(), "three slashes begin an absolute path");
    insta::assert_snapshot!(session.transcript);
}

/// Every line on stderr is JSON, or belongs to a document that is.
fn all_json(text: &str) -> usize {
    let stream = serde_json::Deserializer::from_str(text).into_iter::<serde_json::Value>();
    stream.map(|value| assert!(value.expect(text).is_object(), "{text}")).count()
}

#[test]
fn with_json_output_stderr_has_nothing_else() {
    let mut session = Session::new().on_a_terminal("y\n");
    session.run_unseen("resource set-defaults gpt-4 -l rpm:5 -l tpm:5", usize::MAX);
    for line in [
        "resource set-defaults gpt-4 -l rpm:5 -o json --store memory:",
        "resource set-defaults gpt-4 -l rpm:5 -o json -v",
        "resource delete-defaults gpt-4 -o json",
        "resource delete-defaults gpt-4 -o json -y",
        "acquire key-1 gpt-4 -c rpm:1 -l rpm:1 -o json -v",
        "acquire key-1 gpt-4 -c rpm:1 -l rpm:1 --wait 2min -o json",
        "acquire key-1 gpt-4 -c rmp:1 -o json",
        "namespace register a -o json",
        "namespace delete a -o json",
        "namespace delete a -o json -y",
        "demo --seconds 1 -o json",
        "bench --store memory: --each 2 --concurrency 1 --entities 1 -o json -v",
        "bench --each 2 --concurrency 1 --entities 1 -o json",
        "usage list -o json",
        "usage summary -e key-1 -r gpt-4 -o json",
        "usage list --plot -o json",
        "audit list -e key-1 -o json",
        "nonsense -o json",
    ] {
        let (_, stdout, stderr) = session.run_unseen(line, usize::MAX);
        all_json(&stderr);
        let documents =
            serde_json::Deserializer::from_str(&stdout).into_iter::<serde_json::Value>();
        documents.for_each(|value| drop(value.expect(line)));
    }
    // A warning is not lost.
    let line = "resource set-defaults gpt-4 -l rpm:5 -o json --store memory:";
    let (_, _, stderr) = session.run_unseen(line, usize::MAX);
    assert_eq!(all_json(&stderr), 1);
    assert!(stderr.starts_with("{\"warning\":\"memory: loses"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1);
}
