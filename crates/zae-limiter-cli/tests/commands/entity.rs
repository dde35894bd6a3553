use crate::session::Session;

#[test]
fn created_shown_and_listed() {
    let mut session = Session::new();
    for line in [
        "entity create project-1 --display-name 'Search, nightly'",
        "entity create key-1 --parent project-1 --cascade --metadata team=search --metadata a=b=c",
        "entity create key-2 --parent project-1 -o json",
        "entity show project-1",
        "entity show key-1",
        "entity show key-1 -o json",
        "entity children project-1",
        "entity children project-1 -o json",
        "entity children key-1",
        "entity children key-1 -o json",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_cannot_be_created_or_shown() {
    let mut session = Session::new();
    session.run("entity create key-1 -q");
    for line in [
        "entity create key-1",
        "entity create key-1 -o json",
        "entity create key-2 --parent nobody",
        "entity create key-2 --parent key-2",
        "entity create key#2",
        "entity create key-2 --cascade",
        "entity create key-2 --metadata team",
        "entity create key-2 --metadata =search",
        "entity show key-2",
        "entity show key-2 -o json",
        "entity show",
        "entity list",
        "entity shwo key-1",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn deleted_with_all_that_belongs_to_it() {
    let mut session = Session::new();
    session.run("entity create project-1 -q");
    session.run("entity create key-1 --parent project-1 -q");
    session.run("entity set-limits key-1 -r gpt-4 -l rpm:10 -q");
    session.run("acquire key-1 gpt-4 -c rpm:1 -q");
    for line in [
        "entity delete key-1",
        "entity delete key-1 -o json",
        "entity delete key-1 --yes",
        "entity delete key-1 --yes",
        "entity show key-1",
        "entity get-limits key-1 -r gpt-4",
        "usage list -e key-1",
        "entity delete project-1 --yes -o json",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn a_person_is_asked() {
    let mut session = Session::new().on_a_terminal("n\n");
    session.env.insert("NO_COLOR".to_owned(), "1".to_owned());
    session.run("entity create project-1 -q");
    session.run("entity create key-1 --parent project-1 -q");
    session.run("entity set-limits project-1 -l rpm:10 -q");
    session.run("entity delete project-1");
    session.stdin = "";
    session.run("entity delete-limits project-1");
    session.stdin = "yes\n";
    session.run("entity delete-limits project-1");
    session.stdin = "y\n";
    session.run("entity delete project-1");
    session.run("entity show key-1");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn limits_of_its_own() {
    let mut session = Session::new();
    for line in [
        "entity set-limits key-1 -r gpt-4 -l rpm:100 -l tpm:10000/min:15000",
        "entity set-limits key-1 -l uploads:3/5min -o json",
        "entity get-limits key-1 -r gpt-4",
        "entity get-limits key-1 -r gpt-4 -o json",
        "entity get-limits key-1",
        "entity get-limits key-1 -r _default_ -o json",
        "entity set-limits key-1 -r gpt-4 -l rpm:200/sec -o json",
        "entity get-limits key-1 -r gpt-4",
        "entity delete-limits key-1 -r gpt-4",
        "entity delete-limits key-1 -r gpt-4 -y",
        "entity delete-limits key-1 -r gpt-4 -y",
        "entity delete-limits key-1 -y -o json",
        "entity get-limits key-1",
        "entity get-limits key-1 -r gpt-4 -o json",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn limits_that_cannot_be_set() {
    let mut session = Session::new();
    for line in [
        "entity set-limits key-1 -r gpt-4",
        "entity set-limits key-1 -r gpt-4 -l rpm",
        "entity set-limits key-1 -r gpt-4 -l rpm:0",
        "entity set-limits key-1 -r gpt-4 -l rpm:1 -l rpm:2",
        "entity set-limits key-1 -r gpt#4 -l rpm:1",
        "entity get-limits key-1 --effective",
        "entity get-limits key-1 -r _default_ --effective",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_holds_and_where_it_is_stored() {
    let mut session = Session::new();
    let effective = "entity get-limits key-1 -r gpt-4 --effective";
    session.run(effective);
    session.run(&format!("{effective} -o json"));
    for line in [
        "system set-defaults -l rpm:1 -q",
        "resource set-defaults gpt-4 -l rpm:2 -q",
        "entity set-limits key-1 -l rpm:3 -q",
        "entity set-limits key-1 -r gpt-4 -l rpm:4 -l tpm:40:50 -q",
    ] {
        session.run(line);
        session.run(effective);
    }
    session.run(&format!("{effective} -o json"));
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn entities_with_limits_of_their_own() {
    let mut session = Session::new();
    for line in [
        "entity list --with-custom-limits gpt-4",
        "entity list --with-custom-limits _default_",
        "entity list --with-custom-limits gpt-4 -o json",
        "entity list-resources",
        "entity list-resources -o json",
        "entity set-limits key-2 -r gpt-4 -l rpm:100 -l tpm:10000/min:15000 -q",
        "entity set-limits key-1 -r gpt-4 -l rpm:5 -q",
        "entity set-limits key-1 -r claude-3 -l rpm:6 -q",
        "entity set-limits key-3 -l rpm:7 -q",
        "entity list --with-custom-limits gpt-4",
        "entity list --with-custom-limits gpt-4 -o json",
        "entity list --with-custom-limits _default_",
        "entity list-resources",
        "entity list-resources -o json",
        "entity list --with-custom-limits 4gpt",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_others_wrote_cannot_spoil_the_terminal() {
    let mut session = Session::new();
    session.run("entity create p -q");
    session.run(
        "entity create key-1 --parent p --display-name '\x1b[31mred\nline' --metadata 'k=\x07v'",
    );
    session.run("entity show key-1");
    session.run("entity children p");
    session.run("entity show key-1 -o json");
    session.run("audit list -e key-1");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn the_ninth_level_is_one_too_many() {
    let mut session = Session::new();
    session.run_unseen("entity create level-1", usize::MAX);
    for level in 2..=8 {
        let line = format!("entity create level-{level} --parent level-{}", level - 1);
        assert_eq!(session.run_unseen(&line, usize::MAX).0, 0);
    }
    let (status, _, stderr) =
        session.run_unseen("entity create level-9 --parent level-8", usize::MAX);
    assert_eq!(status, 1);
    // It has exactly eight levels above it.
    assert!(!stderr.contains("more than 8 levels above"), "{stderr}");
    assert!(
        stderr.contains("level-9 would be level 9 of its hierarchy, and 8 is the most"),
        "{stderr}"
    );
}
