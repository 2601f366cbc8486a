use super::*;

#[test]
fn a_default_request_is_in_range() {
    assert_eq!(check(&Request::new(Prompt::Tokens(vec![1])), 2), Ok(()));
}
