// <button data-confirm="Cancel job 17?"> asks before its form is sent: also while the other scripts are still on their
// way, so pages load this one before they show a button.
document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm ?? event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});
