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
