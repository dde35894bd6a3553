use crate::session::Session;

#[test]
fn what_is_there_and_how_long_until_more_is() {
    let mut session = Session::new();
    session.run("acquire key-1 gpt-4 -l rpm:10 -l tpm:1000:1500 -c rpm:1 -c tpm:1400");
    session.run("available key-1 gpt-4");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn nothing_holds() {
    let mut session = Session::new();
    session.run("available key-1 gpt-4");
    session.run("available key-1 gpt-4 -o json");
    session.run("available key-1 gpt-4 -c rpm:1");
    insta::assert_snapshot!(session.transcript);
}
