//! `docs/cli-reference.md` is generated from the code.

#[test]
fn the_reference_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli-reference.md");
    let wanted = zae_limiter_cli::reference();
    if std::env::var_os("ZAEL_UPDATE_REFERENCE").is_some() {
        std::fs::write(path, &wanted).expect("the page can be written");
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == wanted,
        "docs/cli-reference.md is out of date; update it: \
         ZAEL_UPDATE_REFERENCE=1 cargo test -p zae-limiter-cli --test reference"
    );
}
